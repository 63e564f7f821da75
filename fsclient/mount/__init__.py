"""A mount as a process: the client that connects all parts, its daemon and its metrics."""
