"""Tests of the CSI driver: the real program, real mounts and real kills."""
