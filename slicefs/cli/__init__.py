"""The command groups of the library."""
