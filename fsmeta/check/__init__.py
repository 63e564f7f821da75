"""The metadata check (fsck): what contradicts itself, and repairs that have one safe way."""
