"""Faults of Redis."""
