"""The cache on local disks: directories, files, eviction and the health of each disk."""
