"""Metadata of a SliceFS volume: names, inodes and slices over a small transaction."""
