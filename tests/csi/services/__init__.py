"""Tests of csi/services."""
