"""What `tools/house.py` checks: the tree as modules, and one file for each family of rules."""
