"""Ids of inodes and slices: batches of them from the store, and slices on their way."""
