"""`fsdata/disk_cache`."""
