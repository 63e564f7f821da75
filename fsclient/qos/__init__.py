"""Rate limits: how much users, groups, directories and a volume may do in a second."""
