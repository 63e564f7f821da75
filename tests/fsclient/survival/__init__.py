"""Tests of what a worker leaves to the next one."""
