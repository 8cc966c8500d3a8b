"""How far a file has been published, so that publishing it again goes on there.

Kept under a key made of provider, real path and form, from the first line to the last; once a file is published,
nothing of it remains, and publishing it again is publishing it again. When publishing to a data directory, it is kept
in the control store; to a silo, in a file of this user's (`XDG_STATE_HOME`), one for each cluster that it is being
published to. Which of them is this cluster's, the log knows: it has the producer. So it does not matter by which
addresses the silos are named; they count only where the log knows none of the producers.

Before each call the journal notes two positions: up to where everything is stored, and up to where this call goes. Each
is a place in the file and the digest of the file up to there. Which of the two holds after kill -9, the log knows: the
call carries the producer's id and the line number as its sequence.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from ...adapters import ProducerSequence
from ..datadir import DataDirectory, lock, open_data_directory
from ..provider import Provider
from .lines import CHUNK_BYTES, Form

if TYPE_CHECKING:
    from ...streams.client import Client

_LOCKS = ".publish"


class Notes(Protocol):
    """Where journals are kept, and who knows what is stored."""

    @property
    def provider(self) -> str:
        """Name of the provider, part of a journal's key."""
        ...

    @property
    def addresses(self) -> Collection[str]:
        """Of the silos. Empty: there is one place, so whatever is kept is of this one."""
        ...

    async def entries(self, key: str) -> Mapping[str, str]:
        """What is kept under a key, by the keys to change it with."""
        ...

    def new_name(self, key: str) -> str:
        """For one more entry under a key."""
        ...

    async def set_value(self, key: str, value: str | None) -> None: ...

    async def last_sequence(self, producer: str) -> int: ...

    def lock(self, key: str, what: str) -> AbstractContextManager[object]:
        """Keep other processes out, which would each think that the other's lines are theirs. Raises Busy."""
        ...


class NotesOnData:
    """In the control store of a data directory."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider.name
        self.addresses: Collection[str] = ()
        self._value = provider.store.value
        self.set_value = provider.store.set_value
        self.last_sequence = provider.adapter.last_sequence
        self._data = provider.data

    async def entries(self, key: str) -> Mapping[str, str]:
        value = await self._value(key)
        return {} if value is None else {key: value}

    def new_name(self, key: str) -> str:
        return key

    def lock(self, key: str, what: str) -> AbstractContextManager[object]:
        assert self._data is not None
        return lock(open_data_directory(self._data), _LOCKS, key, what)


class NotesOfUser:
    """In files of this user, about a provider of silos at these addresses."""

    def __init__(self, client: Client, addresses: Collection[str]) -> None:
        """Raises OSError where this user has no place for files."""
        self.provider = client.provider
        self.addresses = addresses
        self.last_sequence = client.last_sequence
        self._folder = state_folder()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def entries(self, key: str) -> Mapping[str, str]:
        return await asyncio.to_thread(self._read, _plain(key))

    def new_name(self, key: str) -> str:
        return f"{key}/{uuid.uuid4().hex[:16]}"

    async def set_value(self, key: str, value: str | None) -> None:
        path = self._folder / f"{_plain(key)}.json"
        if value is None:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        else:
            await asyncio.to_thread(_replace, path, value)

    def lock(self, key: str, what: str) -> AbstractContextManager[object]:
        return lock(DataDirectory(self._folder), _LOCKS, key, what)

    def _read(self, key: str) -> dict[str, str]:
        return {path.stem: path.read_text(encoding="utf-8") for path in sorted(self._folder.glob(f"{key}-*.json"))}


def _plain(name: str) -> str:
    """As the name of a file."""
    return name.replace("/", "-")


def state_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "headrace"


def _replace(path: Path, text: str) -> None:
    """Write a file so that after a crash it is the old one or the new one."""
    unfinished = path.with_suffix(".new")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


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
    addresses: Sequence[str] = ()
    """By which the silos have been named."""


class Found(NamedTuple):
    """An entry of the place that is published to."""

    name: str
    entry: Entry
    last: int
    """The highest number that is stored; 0 where the log has forgotten the producer."""


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

    def __init__(self, notes: Notes, path: str, form: Form) -> None:
        self._notes = notes
        self.path = path
        self.key = journal_key(notes.provider, path, form)
        self._key = f"publish/{self.key}"
        self._name = notes.new_name(self._key)
        self._addresses = set(notes.addresses)
        self._producer = ""
        self._previous = 0
        self._done = Reader().position

    async def stored(self) -> Position | None:
        """Up to where the file had been published; None where there is nothing to go on with."""
        found = await self._found()
        if found is None:
            return None
        self._name, entry, self._previous = found
        self._producer = entry.producer
        self._addresses.update(entry.addresses)
        # 0 for a producer that the log has forgotten: then `done` holds, and the sequence starts anew.
        self._done = entry.next if entry.next.lines == self._previous else entry.done
        return self._done

    async def _found(self) -> Found | None:
        forgotten: Found | None = None
        for name, text in (await self._notes.entries(self._key)).items():
            entry = msgspec.json.decode(text, type=Entry)
            found = Found(name, entry, await self._notes.last_sequence(entry.producer))
            if found.last:
                return found
            if not self._notes.addresses or self._addresses.intersection(entry.addresses):
                forgotten = found
        return forgotten

    def start_anew(self) -> None:
        self._producer, self._previous = uuid.uuid4().hex, 0
        self._done = Reader().position

    async def intend(self, next_position: Position) -> ProducerSequence:
        """Note that all lines up to `next_position` are about to be published; the call carries what this returns."""
        await self._save(Entry(self.path, self._producer, self._done, next_position, sorted(self._addresses)))
        return ProducerSequence(self._producer, next_position.lines, self._previous)

    def published(self, position: Position) -> None:
        self._done, self._previous = position, position.lines

    async def forget(self) -> None:
        """The whole file is published."""
        await self._notes.set_value(self._name, None)

    def alone(self, file: Path) -> AbstractContextManager[object]:
        """For the length of a `with`, no other process publishes the file. Raises Busy."""
        return self._notes.lock(self.key, f"{file} is being published already")

    async def _save(self, entry: Entry) -> None:
        await self._notes.set_value(self._name, msgspec.json.encode(entry).decode())
