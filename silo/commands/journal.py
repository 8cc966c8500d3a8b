"""How far a file has been published, so that publishing it again goes on there.

Kept in the control store under a key made of provider, real path and form, from the first line to the last; once a file
is published, nothing of it remains, and publishing it again is publishing it again.

Before each call the journal notes two positions: up to where everything is stored, and up to where this call goes. Each
is a place in the file and the digest of the file up to there. Which of the two holds after kill -9, the log knows: the
call carries the producer's id and the line number as its sequence.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from dataclasses import asdict

import msgspec

from ...adapters import ProducerSequence
from ..provider import Provider
from .lines import CHUNK_BYTES, Form


class Position(msgspec.Struct, frozen=True):
    """A place between two lines of a file: how many lines and bytes are before it, and what those bytes hash to."""

    lines: int
    bytes: int
    digest: str


class Entry(msgspec.Struct, frozen=True):
    """What is stored."""

    path: str
    producer: str
    done: Position
    next: Position


class Reader:
    """Follows how far a file has been read, and what it held up to there."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._lines = self._bytes = 0

    def add(self, raw: bytes, lines: int) -> None:
        self._hash.update(raw)
        self._lines += lines
        self._bytes += len(raw)

    @property
    def position(self) -> Position:
        return Position(self._lines, self._bytes, self._hash.hexdigest())

    def move_to(self, descriptor: int, position: Position) -> bool:
        """Read a file from its start up to `position`. False where it is not what it was, or no line ends there."""
        left, last = position.bytes, b"\n"
        while left and (chunk := os.read(descriptor, min(left, CHUNK_BYTES))):
            self.add(chunk, 0)
            left, last = left - len(chunk), chunk[-1:]
        self._lines = position.lines
        at_a_line = last == b"\n" or position.bytes == os.fstat(descriptor).st_size
        return self.position == position and at_a_line


def journal_key(provider: str, path: str, form: Form) -> str:
    return hashlib.sha256(msgspec.json.encode((provider, path, asdict(form)))).hexdigest()


class Journal:
    """The journal of one file, named by its real path."""

    def __init__(self, provider: Provider, path: str, form: Form) -> None:
        self._provider = provider
        self.path = path
        self.key = journal_key(provider.name, path, form)
        self._producer = ""
        self._previous = 0
        self._done = Reader().position

    async def stored(self) -> Position | None:
        """Up to where the file had been published; None where there is nothing to go on with."""
        text = await self._provider.store.value(self._name)
        if text is None:
            return None
        entry = msgspec.json.decode(text, type=Entry)
        self._producer = entry.producer
        # 0 for a producer that the log has forgotten: then `done` holds, and the sequence starts anew.
        self._previous = await self._provider.adapter.last_sequence(entry.producer)
        self._done = entry.next if entry.next.lines == self._previous else entry.done
        return self._done

    def start_anew(self) -> None:
        self._producer, self._previous = uuid.uuid4().hex, 0
        self._done = Reader().position

    async def intend(self, next_position: Position) -> ProducerSequence:
        """Note that all lines up to `next_position` are about to be published; the call carries what this returns."""
        await self._save(Entry(self.path, self._producer, self._done, next_position))
        return ProducerSequence(self._producer, next_position.lines, self._previous)

    def published(self, position: Position) -> None:
        self._done, self._previous = position, position.lines

    async def forget(self) -> None:
        """The whole file is published."""
        await self._provider.store.set_value(self._name, None)

    @property
    def _name(self) -> str:
        return f"publish/{self.key}"

    async def _save(self, entry: Entry) -> None:
        await self._provider.store.set_value(self._name, msgspec.json.encode(entry).decode())
