"""Benchmarks: random models by published shape, harness, rows."""
