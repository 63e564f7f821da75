"""`fsdata/objects/rados`."""
