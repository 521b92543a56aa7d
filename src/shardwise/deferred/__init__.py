"""Models that are built without values, larger than the memory of one device."""
