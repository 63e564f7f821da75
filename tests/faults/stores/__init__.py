"""Faults of object stores."""
