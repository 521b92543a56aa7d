"""Time, foreseen: what the operations of a step take on a device, and when they run."""
