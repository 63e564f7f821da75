"""The VFS: one method per file system request, over metadata and open files."""
