"""`fsmeta/ops`."""
