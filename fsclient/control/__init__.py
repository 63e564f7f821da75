"""Requests to a running mount through control xattrs: clones, warmup, information, durability."""
