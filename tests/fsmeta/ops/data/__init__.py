"""`fsmeta/ops/data`."""
