"""`fsdata/staging`."""
