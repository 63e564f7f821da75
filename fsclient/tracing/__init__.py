"""Traces of requests: spans of each layer, and what sends them to a collector."""
