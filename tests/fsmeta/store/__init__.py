"""`fsmeta/store`."""
