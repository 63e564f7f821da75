"""Manifests: a frozen listing of a tree as one object."""
