"""Histories of calls by several clients, and a judge of whether they are linearizable."""
