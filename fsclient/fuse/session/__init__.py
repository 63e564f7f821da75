"""The FUSE session: threads that read `/dev/fuse`, INIT, notifications and interrupts."""
