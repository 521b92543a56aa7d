"""Dry runs: the engine's own code on fake tensors, as one rank of any number, with the kernels of a GPU."""
