"""Tests, by layer: docs/TESTING.md names them."""
