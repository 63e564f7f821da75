"""`fsmeta/ops/names`."""
