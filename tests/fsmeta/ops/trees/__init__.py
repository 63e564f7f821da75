"""`fsmeta/ops/trees`."""
