"""The block store: whole blocks and ranges, from memory, disks or the object store."""
