"""`fsmeta/writeback`."""
