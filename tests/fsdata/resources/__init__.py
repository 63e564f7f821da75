"""`fsdata/resources`."""
