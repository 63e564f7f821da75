"""Layouts of sharded checkpoints, read without torch: what each shard holds, and where."""
