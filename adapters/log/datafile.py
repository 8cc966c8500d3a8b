"""Verify the file of an LMDB environment when it is opened, as far as possible.

LMDB writes its two meta pages alternately: page N & 1 describes transaction N. It uses the page with the higher number,
and verifies neither page. So after a flipped bit it may use the older page, and the last commit is missing.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

import lmdb

from ...streams.durable import sync_path
from ...streams.errors import DataDirectoryError
from ...streams.private_files import FILE_MODE

_NO_PAGE = (1 << 64) - 1
_ATTEMPTS = 5
"""Number of reads before a fault counts: another process may be writing a meta page during a read."""
_PAUSE_S = 0.01
_META = struct.Struct("=40x 40x Q 40x Q Q Q")
"""A meta page of LMDB 0.9. Its fields are: header, magic, version, address and map size; the two databases (free pages,
names), each with its root at the end; the last page; the transaction. Integers have the machine's byte order."""
RELAXED = "relaxed"


class _MetaPage(NamedTuple):
    free_root: int
    names_root: int
    last_page: int
    transaction: int


def note_relaxed(path: Path) -> None:
    """Record on disk that the log in this directory is or was opened with durability `relaxed`.

    Such commits do not wait for the disk: after a power failure the meta pages may be of any two transactions.
    """
    mark = path / RELAXED
    if not mark.exists():
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        sync_path(path)


def check_file(environment: lmdb.Environment, path: Path) -> None:
    """Raise DataDirectoryError if the file of an open environment is too short for its pages, or if its two meta pages
    contradict each other."""
    file, page_bytes = path / "data.mdb", environment.stat()["psize"]
    _check_length(environment, file, page_bytes)
    fault = ""
    for _ in range(_ATTEMPTS):
        even, odd = _meta_pages(file, page_bytes)
        fault = _fault(even, odd, in_order=not (path / RELAXED).exists())
        if not fault:
            return
        time.sleep(_PAUSE_S)
    raise DataDirectoryError(f"'{file}' is damaged: {fault}: restore the data directory from a backup")


def _check_length(environment: lmdb.Environment, file: Path, page_bytes: int) -> None:
    """Raise DataDirectoryError if the file is too short. LMDB maps it: a read behind its end kills the process."""
    expected = (environment.info()["last_pgno"] + 1) * page_bytes
    found = file.stat().st_size
    if found < expected:
        raise DataDirectoryError(f"'{file}' is cut short: {found:,} bytes of {expected:,}")


def _meta_pages(file: Path, page_bytes: int) -> tuple[_MetaPage, _MetaPage]:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.pread(descriptor, 2 * page_bytes, 0)
    finally:
        os.close(descriptor)
    return _MetaPage(*_META.unpack_from(content)), _MetaPage(*_META.unpack_from(content, page_bytes))


def _fault(even: _MetaPage, odd: _MetaPage, *, in_order: bool) -> str:
    """Return why the two meta pages cannot both be right, or "". `in_order` says whether commits reach the disk in
    order."""
    older, newer = (even, odd) if even.transaction < odd.transaction else (odd, even)
    numbers = f"{even.transaction} and {odd.transaction}"
    if newer.transaction == 0:
        return ""  # nothing is committed yet
    if even.transaction % 2 or not odd.transaction % 2:
        return f"its meta pages are of transactions {numbers}, but the first must be even and the second odd"
    if in_order and newer.transaction - older.transaction > 1:
        return f"its meta pages are of transactions {numbers}, which do not follow each other"
    if newer.last_page < older.last_page:
        return f"its last page was {older.last_page} before, and is {newer.last_page} now"
    for root in (newer.free_root, newer.names_root):
        if root != _NO_PAGE and not 2 <= root <= newer.last_page:
            return f"its meta page points to page {root}, but its pages are 2 to {newer.last_page}"
    return ""
