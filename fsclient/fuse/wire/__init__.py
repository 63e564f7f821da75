"""The FUSE protocol: structures of the kernel's header, parsed requests and packed answers."""
