"""Verbs on whole trees: clones, snapshots, and the scan that counts for a quota."""
