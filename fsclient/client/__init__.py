"""The client without the kernel: its parts, how they are made and taken down, and its options."""
