"""States that rest on the host or on a disk, and their way to the device and back."""
