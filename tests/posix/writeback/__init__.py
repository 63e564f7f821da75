"""POSIX on mounts with `--writeback`."""
