"""The HTTP server: four wire formats over one engine, its state, and its page."""
