"""File data of a SliceFS volume: slices, blocks, objects and their caches."""
