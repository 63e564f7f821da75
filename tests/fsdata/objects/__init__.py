"""`fsdata/objects`."""
