"""Work on whole volumes: dumps, quotas, snapshots, clones and the expiry of the trash."""
