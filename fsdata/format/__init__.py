"""Formats of objects: blocks of version 1 and 2, checksums, encryption and object keys."""
