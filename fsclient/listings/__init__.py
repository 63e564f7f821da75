"""Listings of directories: pages of names, their cookies, and what a mount keeps of them."""
