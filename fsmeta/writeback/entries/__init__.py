"""Entries of the journal: which verb with which arguments, and its order domains."""
