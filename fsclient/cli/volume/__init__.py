"""Commands on a volume: format, config, status, quota, dump and others."""
