"""The table of open files: handles, access times, and what an unlinked or closed file leaves."""
