"""Faults of cache, staging and store disks."""
