"""Faults under `--writeback`."""
