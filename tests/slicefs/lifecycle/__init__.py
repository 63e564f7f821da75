"""Chores around checkpoints: layouts of shards."""
