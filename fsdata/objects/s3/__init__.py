"""The S3 store: requests signed here and sent over plain HTTP connections."""
