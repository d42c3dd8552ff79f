"""Benchmark and accuracy report: `python -m cute_attn.bench`."""
