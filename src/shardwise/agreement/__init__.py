"""The agreement of ranks: all issue the same operations, and one error stops them all when they cannot continue."""
