"""Damage in the write-ahead log of SQLite, `control.db-wal`, which SQLite does not report.

The log is a header and frames: a page each, with a checksum over all frames before it. SQLite reads up to the first
frame that does not match, and then overwrites the rest: such a frame usually is the end of a transaction that a power
failure cut off. But the control store syncs each transaction before the next one is written. So a frame that does not
match, and is followed by a whole other transaction, was damaged later. Format: https://sqlite.org/fileformat2.html
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_HEADER, _FRAME = 32, 24
_ORDERS = {0x377F0682: "<", 0x377F0683: ">"}
"""The byte order of the words that the checksums add, by magic number."""
_PAGE = 4096
"""Size of the pages, if the header is damaged."""


class DamagedFrame(NamedTuple):
    """The first damaged frame. What was saved in it, and in the frames after it, cannot be read."""

    number: int
    """From 1; 0 if the header is damaged."""
    frames: int
    """Number of frames in the file up to the last one of this log."""

    def __str__(self) -> str:
        what = f"frame {self.number:,} of {self.frames:,}" if self.number else f"the header of {self.frames:,} frames"
        return f"control.db-wal: the checksum of {what} does not match, so data that was saved last cannot be read"


def find_damage(control_db: Path) -> DamagedFrame | None:
    """Return the first damaged frame of the write-ahead log beside a database; None if SQLite reads all of it, or all
    but the last transaction. Other processes may use the database meanwhile."""
    with suppress(FileNotFoundError, PermissionError):
        found = _find(Path(f"{control_db}-wal").read_bytes())
        # A frame that another process wrote while the file was read looks damaged, but only at the first reading.
        return found and _find(Path(f"{control_db}-wal").read_bytes())
    return None


class _Header(NamedTuple):
    page: int
    order: str
    """Byte order of the words that the checksums add, as in `struct`."""
    salt: bytes
    """The same in the header and all frames of one log: frames of an earlier log stay behind its end."""
    sums: tuple[int, int]


class _Frame(NamedTuple):
    at: int
    commits: bool
    """Whether the frame is the last one of a transaction."""
    salt: bytes


def _find(content: bytes) -> DamagedFrame | None:
    if len(content) < _HEADER + _FRAME:
        return None
    header = _header(content)
    frames = list(_frames(content, _PAGE if header is None else header.page))
    if not frames:
        return None
    valid = 0 if header is None else _matching(content, header, frames)
    salt = frames[0].salt if header is None else header.salt
    rest = [(number, frame) for number, frame in enumerate(frames[valid:], valid + 1) if frame.salt == salt]
    committed = next((number for number, frame in rest if frame.commits), None)
    if committed is None or rest[-1][0] == committed:
        return None
    return DamagedFrame(0 if header is None else valid + 1, rest[-1][0])


def _header(content: bytes) -> _Header | None:
    magic, _, page, _, salt, *sums = struct.unpack_from(">IIII8sII", content)
    order = _ORDERS.get(magic)
    if order is None or _add(content[:24], order, (0, 0)) != tuple(sums):
        return None
    return _Header(page if page > 1 else 1 << 16, order, salt, (sums[0], sums[1]))


def _frames(content: bytes, page: int) -> Iterator[_Frame]:
    for at in range(_HEADER, len(content) - _FRAME - page + 1, _FRAME + page):
        _, pages, salt = struct.unpack_from(">II8s", content, at)
        yield _Frame(at, pages != 0, salt)


def _matching(content: bytes, header: _Header, frames: Iterable[_Frame]) -> int:
    """Return how many frames match their checksums, from the first one on."""
    sums, count = header.sums, 0
    for frame in frames:
        start = frame.at + _FRAME
        sums = _add(content[frame.at : frame.at + 8], header.order, sums)
        sums = _add(content[start : start + header.page], header.order, sums)
        if frame.salt != header.salt or sums != struct.unpack_from(">II", content, frame.at + 16):
            break
        count += 1
    return count


def _add(content: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    """Return the checksums after more content."""
    first, second = sums
    words = struct.unpack(f"{order}{len(content) // 4}I", content)
    following = iter(words)
    for one, other in zip(following, following, strict=True):
        first = first + one + second & 0xFFFFFFFF
        second = second + other + first & 0xFFFFFFFF
    return first, second
