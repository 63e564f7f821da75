"""Attached files of a mount: when they get bytes of their own."""
