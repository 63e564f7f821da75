"""Background work of a mount: the leader, compaction, packing, backups and the trash."""
