"""Estimates from sizes: the bytes and the seconds of a step on a machine, without a run of the whole model."""
