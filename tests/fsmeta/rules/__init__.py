"""`fsmeta/rules`."""
