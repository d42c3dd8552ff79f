"""What 8-bit attention does to a language model's predictions: `python -m cute_attn.eval`."""
