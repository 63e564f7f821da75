"""Tests of csi/host."""
