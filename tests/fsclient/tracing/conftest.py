"""Fixtures of the tests of traces."""

from tests.faults.fixtures import base, durable_redis, embedded, served

__all__ = ["base", "durable_redis", "embedded", "served"]
