"""Fixtures of the tests of commands."""

from tests.faults.fixtures import base, durable_redis, embedded, served

__all__ = ["base", "durable_redis", "embedded", "served"]
