"""Tests of csi/cluster."""
