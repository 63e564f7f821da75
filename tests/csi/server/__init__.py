"""Tests of csi/server."""
