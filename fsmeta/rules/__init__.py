"""Rules that verbs share: permissions, quotas, locks, and the settings of a volume."""
