"""Copying trees between directories, mounts and S3 prefixes: what `slicefs sync` does."""
