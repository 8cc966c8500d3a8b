"""Bugs that a store must not have, planted on purpose: the suites have to find each of them."""

import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import lmdb
from sqlalchemy import event
from sqlalchemy.engine import Engine

from headrace.adapters.log.blocks import Block, BlockPlace
from headrace.store import rows
from tests.storage.recording import Step


def acknowledge_before_the_sync(stack: ExitStack) -> None:
    """The log commits without waiting for the disk."""
    opened = lmdb.open

    def open_without_sync(*args: Any, **options: Any) -> lmdb.Environment:
        return opened(*args, **{**options, "sync": False})

    stack.enter_context(patch.object(lmdb, "open", open_without_sync))


def last_commit_without_meta(stack: ExitStack) -> None:
    """The log waits for the data, and not for the page with its place."""
    opened = lmdb.open

    def open_without_meta_sync(*args: Any, **options: Any) -> lmdb.Environment:
        return opened(*args, **{**options, "metasync": False})

    stack.enter_context(patch.object(lmdb, "open", open_without_meta_sync))


def no_sync_of_directories(stack: ExitStack) -> None:
    """New files are written, and their names are not."""
    sync = os.fsync

    def sync_files(descriptor: int) -> None:
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112 (a descriptor)
            sync(descriptor)

    stack.enter_context(patch.object(os, "fsync", sync_files))


def checkpoints_without_sync(stack: ExitStack) -> None:
    """The control store says that it has saved something that is in memory."""

    def hurry(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", hurry)
    stack.callback(event.remove, Engine, "connect", hurry)


def checksums_ignored(stack: ExitStack) -> None:
    """A block is believed whatever it says."""
    begin = Block.__init__

    def begin_unchecked(block: Block, record: bytes | memoryview, place: BlockPlace, *, check: bool = True) -> None:
        begin(block, record, place, check=False)

    stack.enter_context(patch.object(Block, "__init__", begin_unchecked))


def row_checksums_ignored(stack: ExitStack) -> None:
    """A row of the control store is believed, although it does not match its checksum."""

    def believe(table: str, row: object) -> None: ...

    stack.enter_context(patch.object(rows, "check_row", believe))


def meta_before_data(steps: Sequence[Step]) -> list[Step]:
    """The disk does not wait for the data of the log, and so its meta page comes first. Planted in the recording."""
    return [step for step in steps if not (step.kind == "sync" and step.path.endswith("data.mdb"))]


IN_THE_PROCESS: Mapping[str, Callable[[ExitStack], None]] = {
    "acknowledge before the sync": acknowledge_before_the_sync,
    "last commit without meta": last_commit_without_meta,
    "no sync of directories": no_sync_of_directories,
    "checkpoints without sync": checkpoints_without_sync,
}
IN_THE_RECORDING: Mapping[str, Callable[[Sequence[Step]], list[Step]]] = {"meta before data": meta_before_data}
WHILE_READING: Mapping[str, Callable[[ExitStack], None]] = {
    "checksums ignored": checksums_ignored,
    "row checksums ignored": row_checksums_ignored,
}


def planted(bug: str, stack: ExitStack) -> None:
    IN_THE_PROCESS[bug](stack)
