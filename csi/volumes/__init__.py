"""Volumes and snapshots of the controller: directories of a SliceFS volume, and their records."""
