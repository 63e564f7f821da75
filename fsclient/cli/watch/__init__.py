"""Commands that watch a mount: stats, top, profile."""
