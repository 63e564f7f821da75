"""`fsclient/background`."""
