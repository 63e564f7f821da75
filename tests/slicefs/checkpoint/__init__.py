"""Checkpoints and their lifecycle, without torch."""
