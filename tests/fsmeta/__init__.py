"""The metadata: the store contract on every engine, the cache, the schema, `check`, the verbs."""
