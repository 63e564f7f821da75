"""`fsmeta/admin`."""
