"""Keys and records of the metadata store: what each row holds, byte by byte."""
