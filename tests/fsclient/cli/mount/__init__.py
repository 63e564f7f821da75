"""`fsclient/cli/mount`."""
