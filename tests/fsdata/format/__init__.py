"""`fsdata/format`."""
