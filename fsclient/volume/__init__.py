"""How a volume is named and opened: URLs, object stores, keys, caches and mount roots."""
