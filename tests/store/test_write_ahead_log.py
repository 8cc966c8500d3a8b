"""Damage in SQLite's write-ahead log: found unless it may be the end of a transaction that a power failure cut off."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace.store.write_ahead_log import DamagedFrame, find_damage

HEADER, FRAME, PAGE = 32, 24, 4096


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[Path, sqlite3.Connection]]:
    """A database whose write-ahead log has seven transactions of two frames or more."""
    with closing(sqlite3.connect(tmp_path / "control.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE numbers (number)")
        add(connection, 6)
        yield tmp_path / "control.db", connection


def add(connection: sqlite3.Connection, transactions: int) -> None:
    for _ in range(transactions):
        connection.execute("INSERT INTO numbers VALUES (randomblob(5000))")


def commits(content: bytes) -> list[int]:
    """Numbers of the frames that end a transaction."""
    count = (len(content) - HEADER) // (FRAME + PAGE)
    ends = [int.from_bytes(content[(at := HEADER + one * (FRAME + PAGE)) + 4 : at + 8]) for one in range(count)]
    return [one for one, pages in enumerate(ends, 1) if pages]


def damaged(path: Path, content: bytes, byte: int) -> DamagedFrame | None:
    changed = bytearray(content)
    changed[byte] ^= 4
    (path / "control.db-wal").write_bytes(changed)
    return find_damage(path / "control.db")


def test_a_damaged_frame_is_found_if_another_transaction_follows(
    written: tuple[Path, sqlite3.Connection], tmp_path: Path
) -> None:
    content = Path(f"{written[0]}-wal").read_bytes()
    ends = commits(content)
    copy = tmp_path / "copy"
    copy.mkdir()
    for number in range(1, ends[-1] + 1):
        at = HEADER + (number - 1) * (FRAME + PAGE)
        for byte in (0, 9, 17, FRAME, FRAME + PAGE - 1):  # page number, salt, checksum, page
            # Without its salt, the end of the last transaction but one could belong to an older log.
            follows = number < ends[-2] or (number == ends[-2] and byte != 9)
            assert damaged(copy, content, at + byte) == (DamagedFrame(number, ends[-1]) if follows else None)
    for byte in range(HEADER):
        assert damaged(copy, content, byte) == DamagedFrame(0, ends[-1])


def test_a_sound_log_has_no_damage(written: tuple[Path, sqlite3.Connection]) -> None:
    path, connection = written
    assert find_damage(path) is None
    connection.execute("PRAGMA wal_checkpoint(RESTART)")
    add(connection, 2)  # older frames stay behind these
    assert find_damage(path) is None


@pytest.mark.parametrize("size", [None, 0, 10, 40])
def test_a_log_without_frames_has_no_damage(tmp_path: Path, size: int | None) -> None:
    if size is not None:
        (tmp_path / "control.db-wal").write_bytes(bytes(size))
    assert find_damage(tmp_path / "control.db") is None
