"""Open files of a mount: opening, reads and writes, commits of slices, and their errors."""
