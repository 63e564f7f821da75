"""What the kernel may be told: the file system's contract, leases and virtual names."""
