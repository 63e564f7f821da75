"""`fsdata/blocks`."""
