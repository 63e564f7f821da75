"""`fsmeta/schema`."""
