"""`fsclient/cli/volume`."""
