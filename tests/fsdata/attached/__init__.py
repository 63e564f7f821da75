"""`fsdata/files`."""
