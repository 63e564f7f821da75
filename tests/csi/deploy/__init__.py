"""Tests of csi/deploy."""
