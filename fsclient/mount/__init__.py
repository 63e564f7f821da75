"""A mount as a process: the client that connects all parts, and its daemon."""
