"""The host: commands that run, mounts of the kernel, and records on disk."""
