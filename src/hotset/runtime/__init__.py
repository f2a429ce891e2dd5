"""The engine: prefill, decode, sampling, text."""
