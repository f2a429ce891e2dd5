"""Where records are: host arena, VRAM slots, address table, and the one place that copies."""
