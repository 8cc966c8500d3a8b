"""Silos as processes for the client's tests."""

from tests.cli.conftest import headrace, silo, silos, start

__all__ = ("headrace", "silo", "silos", "start")
