"""Tests of what a mount shows of itself."""
