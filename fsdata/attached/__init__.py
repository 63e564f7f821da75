"""Attached files: their bytes are objects of a bucket, or files of a directory, of others."""
