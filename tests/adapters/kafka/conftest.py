"""Fixtures of the tests on a real broker of Apache Kafka."""

from tests.servers import kafka_server

__all__ = ("kafka_server",)
