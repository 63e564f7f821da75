"""Verbs on sessions: their leases, file locks and ranges of ids."""
