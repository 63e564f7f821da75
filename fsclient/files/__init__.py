"""Open files of a mount: handles, reads and writes, commits of slices, and their errors."""
