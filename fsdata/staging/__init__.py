"""Staging for write-back: the journal, data segments on a local disk, and their uploads."""
