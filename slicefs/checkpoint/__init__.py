"""Checkpoints: whole or not there."""
