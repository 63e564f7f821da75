"""One directory of the disk cache: its files, its health, what is evicted and what is claimed."""
