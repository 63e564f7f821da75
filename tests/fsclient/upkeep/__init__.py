"""`fsclient/upkeep`."""
