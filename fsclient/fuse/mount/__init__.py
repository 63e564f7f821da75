"""mount(2) and fusermount3: the descriptor of a FUSE mount and its options."""
