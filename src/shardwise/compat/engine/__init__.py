"""`deepspeed.initialize`, and the engine and the optimizer that it returns."""
