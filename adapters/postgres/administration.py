"""Create the tables of queues, and list the providers in a database, for the command line."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from psycopg import Connection
from psycopg.rows import TupleRow

from ...streams.errors import InvalidArgument
from . import schema
from .connecting import DatabasePlace
from .limits import POSTGRES_LIMITS
from .options import PostgresOptions

_PROVIDERS = """
    SELECT p.name, p.queues,
    (SELECT count(DISTINCT s.segment) FROM headrace_segment AS s WHERE s.provider = p.provider),
    (SELECT sum(q.events) FROM headrace_queue AS q WHERE q.provider = p.provider)::bigint - coalesce(o.events, 0),
    (SELECT sum(q.bytes) FROM headrace_queue AS q WHERE q.provider = p.provider)::bigint - coalesce(o.bytes, 0)
    FROM headrace_provider AS p LEFT JOIN LATERAL (
        SELECT sum(s.events)::bigint AS events, sum(s.bytes)::bigint AS bytes FROM headrace_segment AS s
        WHERE s.provider = p.provider GROUP BY s.segment ORDER BY s.segment LIMIT 1
    ) AS o ON true ORDER BY p.name
"""


class ProviderSummary(NamedTuple):
    """The queues of one provider in a database."""

    provider: str
    queues: int
    segments: int
    events: int
    """Retained events."""
    nbytes: int
    """Retained bytes of blocks."""


@contextmanager
def _opened(url: str) -> Generator[Connection[TupleRow]]:
    place = DatabasePlace(PostgresOptions(url=url), POSTGRES_LIMITS)
    with place.translated():
        connection = place.open()
        try:
            yield connection
        finally:
            connection.close()


def migrate(url: str) -> bool:
    """Create the tables. Return whether this changed something: they may be there already.

    Raises InvalidArgument, StorageError, DataDirectoryError if the tables have another version.
    """
    with _opened(url) as connection:
        return schema.migrate(connection)


def providers(url: str) -> Sequence[ProviderSummary]:
    """Return the providers in a database. Raises InvalidArgument if it has no tables, StorageError."""
    with _opened(url) as connection:
        if schema.version(connection) is None:
            raise InvalidArgument("the database has no tables for queues: run `headrace postgres migrate URL`")
        return [ProviderSummary(*row) for row in connection.execute(_PROVIDERS).fetchall()]
