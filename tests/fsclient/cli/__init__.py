"""The `slicefs` program as its users call it: a process, its exit code and its one line."""
