"""`fsmeta/writeback/entries`."""
