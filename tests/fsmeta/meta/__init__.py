"""`fsmeta/meta`."""
