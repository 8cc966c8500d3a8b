"""States of streams, which handlers with effects keep in a database, as a Parquet file."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from ...effects import administration
from ...effects.administration import StoredState
from ...streams.errors import InvalidArgument

ROWS = 10_000
"""Rows of one group of the file. They are in memory at a time."""
SCHEMA = pa.schema(
    [
        pa.field("origin", pa.string(), nullable=False),
        pa.field("subscription", pa.string(), nullable=False),
        pa.field("stream", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("index", pa.int64(), nullable=False),
        pa.field("state", pa.binary(), nullable=False),
        pa.field("version", pa.int32(), nullable=False),
        pa.field("expires_at", pa.timestamp("us", tz="UTC")),
    ]
)


def states(database: str, to: Path, *, subscription: str | None = None, origin: str | None = None) -> int:
    """Write the states in the database at a URL of SQLAlchemy into the file `to`, as they are at one moment. Return
    their number. The file appears when it is complete, and replaces an older one. A symbolic link is followed.

    Raises InvalidArgument for another URL, if the folder of the file does not exist, or if `to` is anything else than a
    file, such as a pipe; NotFound if the database has no tables for effects; StorageError if it cannot be reached.
    """
    target = Path(os.path.realpath(to))
    if not target.parent.is_dir():
        raise InvalidArgument(f"{to}: the folder {target.parent} does not exist: create it first")
    if to.exists() and not to.is_file():
        raise InvalidArgument(f"{to}: it is no regular file, and would be replaced by one: name another file")
    unfinished, written = target.with_name(f".{target.name}.{os.getpid()}"), 0
    try:
        with administration.opened(database) as connection, parquet.ParquetWriter(unfinished, SCHEMA) as writer:
            for rows in administration.pages_of_states(connection, subscription, origin, rows=ROWS):
                writer.write_batch(pa.RecordBatch.from_pylist([_row(each) for each in rows], SCHEMA))
                written += len(rows)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return written


def _row(state: StoredState) -> dict[str, object]:
    return {
        "origin": state.origin, "subscription": state.subscription, "stream": state.stream,
        "offset": state.token.offset, "index": state.token.index,
        "state": state.value, "version": state.version, "expires_at": state.expires_at_us,
    }  # fmt: skip
