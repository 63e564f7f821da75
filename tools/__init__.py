"""What builds, checks and measures SliceFS; nothing here is installed."""
