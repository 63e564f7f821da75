"""The Redis engine: one Lua script per commit, client-side caching, and topology."""
