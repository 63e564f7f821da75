"""The client, by the folders of `fsclient`."""
