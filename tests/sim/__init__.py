"""Deterministic simulation: one seed decides schedule, latency, faults and crashes.

Start at `harness` (how a test uses it), then `scheduler`, `primitives` and `faults`.
"""
