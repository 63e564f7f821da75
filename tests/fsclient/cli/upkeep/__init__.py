"""`fsclient/cli/upkeep`."""
