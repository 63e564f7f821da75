"""Commands on a mount: mount, umount, info, flush, warmup, clone, snapshot."""
