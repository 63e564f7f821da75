"""The native transport: our own session on `/dev/fuse`. `session` and `mount` are its doors."""
