"""`fsmeta/store/tikv`."""
