"""Tests that need torch: `make test-torch`. The default suite leaves them out."""
