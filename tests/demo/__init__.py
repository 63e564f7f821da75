"""`tools/demo.py`, run as a test."""
