"""Verbs on names and inodes: create, link, rename, remove, attributes, ACLs and the trash."""
