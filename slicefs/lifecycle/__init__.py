"""Chores around checkpoints: clean, verify, move, unshard, map and export."""
