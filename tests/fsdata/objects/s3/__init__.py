"""`fsdata/objects/s3`."""
