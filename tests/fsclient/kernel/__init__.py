"""Tests of what the kernel may be told."""
