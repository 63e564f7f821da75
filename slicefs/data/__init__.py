"""Datasets without torch: sources of samples, sharding and order."""
