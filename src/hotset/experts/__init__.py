"""Where records are: the host arena, the VRAM slots, the address table, and the one place that copies."""
