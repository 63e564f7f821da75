"""Verbs on the data of files: extents, packed segments, deletion and garbage collection."""
