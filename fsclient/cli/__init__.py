"""The command line: one file per command, named in `main`."""
