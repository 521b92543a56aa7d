"""DeepSpeed's names that work without an engine: what it puts around torch, its settings, its small functions."""
