"""`fsmeta/store/redis`."""
