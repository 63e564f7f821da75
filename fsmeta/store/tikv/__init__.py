"""The TiKV engine: optimistic transactions, counters in escrow, and the end of old values."""
