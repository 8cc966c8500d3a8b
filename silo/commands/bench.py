"""`headrace bench`: the benchmarks have a package of their own."""

from __future__ import annotations

from ...benchmarks.suite import command

__all__ = ("command",)
