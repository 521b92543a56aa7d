"""This machine: its hardware, memory and bandwidths, and rank processes on it."""
