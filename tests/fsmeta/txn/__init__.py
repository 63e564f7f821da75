"""`fsmeta/txn`."""
