"""The transaction: reads, checks and writes of one commit, its retries, and the cached rows."""
