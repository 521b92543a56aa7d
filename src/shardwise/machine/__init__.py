"""This machine: what it is and how fast, and ranks launched on it."""
