"""Tests of csi/clients."""
