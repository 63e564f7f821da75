"""`fsmeta/check`."""
