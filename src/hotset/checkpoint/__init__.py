"""From safetensors files to records."""
