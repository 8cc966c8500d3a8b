"""Checksums of rows in the control store. They find flipped bits: the pages of SQLite have no checksums.

A checksum covers the columns that are written together with it. Columns that are updated later on their own (the
reason and attempts of a dead letter, the claim on a delayed batch) are not covered.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Row

from ..streams.errors import DataDirectoryError
from ..streams.remedies import remedy


def _seek(row: Row[Any]) -> str:
    command = remedy("subscriptions seek", row.subscription, "START", provider=row.provider)
    return f"set its position with {command}"


def _delete_dead_letter(row: Row[Any]) -> str:
    command = remedy("deadletters delete", "--subscription", row.subscription, row.id, provider=row.provider)
    return f"restore the control store from a backup, or delete the dead letter with {command}"


def _publish_again(_: Row[Any]) -> str:
    return "the batch is not published; restore the control store from a backup, or publish its events again"


class _Covered(NamedTuple):
    """The covered columns of a table."""

    columns: tuple[str, ...]
    key: tuple[str, ...]
    """The columns that name a row in messages."""
    remedy: Callable[[Row[Any]], str]


_CHECKPOINT = _Covered(
    ("provider", "subscription", "queue", "next_offset", "watermark", "behind", "epoch"),
    ("provider", "subscription", "queue"),
    _seek,
)
_DEAD_LETTER = _Covered(
    (
        "provider", "subscription", "queue", "token_offset", "token_index", "stream", "payload", "attributes",
        "timestamp_us",
    ),
    ("provider", "subscription", "id"),
    _delete_dead_letter,
)  # fmt: skip
_DELAYED_BATCH = _Covered(
    ("provider", "queue", "due_at_us", "stream", "events", "priority", "batch"),
    ("provider", "queue", "id"),
    _publish_again,
)
_COVERED = {"checkpoints": _CHECKPOINT, "dead_letters": _DEAD_LETTER, "delayed_batches": _DELAYED_BATCH}

CHECKED_TABLES = tuple(_COVERED)
"""The names of the tables whose rows have a checksum."""


def with_checksum(table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the row with its checksum. The row has all covered columns of the table."""
    return {**row, "checksum": _checksum(table, row)}


def check_row(table: str, row: Row[Any]) -> None:
    """Raise DataDirectoryError if a row that was read does not match its checksum."""
    columns, key, way = _COVERED[table]
    if row.checksum != _checksum(table, {name: getattr(row, name) for name in columns}):
        shown = ", ".join(f"{name} {getattr(row, name)!r}" for name in key)
        what = "the row is damaged (its checksum does not match)"
        raise DataDirectoryError(f"table {table}, {shown}: {what}", hint=way(row))


def _checksum(table: str, row: Mapping[str, Any]) -> int:
    return zlib.crc32(msgspec.msgpack.encode([row[name] for name in _COVERED[table].columns]))
