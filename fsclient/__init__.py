"""The client: the only place where metadata, data and the kernel meet."""
