"""Reading and writing one file: readahead, write buffers, uploads and compaction."""
