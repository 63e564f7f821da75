"""Tests of traces: `mount --trace`."""
