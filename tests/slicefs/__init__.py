"""Tests of the Python library, without torch."""
