"""Adapter `postgres`: queues in tables of PostgreSQL. Needs `headrace[postgres]`. See docs/postgres.md."""

try:
    import psycopg as psycopg  # imported early, so that a missing package is named
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "headrace.adapters.postgres needs the package 'psycopg', which is not installed: "
        "pip install 'headrace[postgres]'",
        name=missing.name,
    ) from None

from .adapter import PostgresAdapter, open_adapter
from .limits import PostgresLimits
from .options import PostgresOptions

__all__ = ("PostgresAdapter", "PostgresLimits", "PostgresOptions", "open_adapter")
