"""A journal of the published part of a file, so that the same command continues after an interruption.

The journal has a key of provider, real path and line format. It exists from the first line to the last. Once the whole
file is published the journal is deleted, and the same command publishes the file once more.

For a data directory the journal is in the control store. For silos it is in files of this user (`XDG_STATE_HOME`), one
for each cluster that gets the file. The right file for this cluster is the one whose producer the log knows. The
addresses of the silos count only if the log knows none of the producers.

Before each call the journal stores two positions: the end of the published lines, and the end of this call's lines.
Each is a place in the file with the digest of the file up to there. After kill -9 the log tells which of the two is
right: the call carries the producer's id, and the line number as its sequence. If the log or the journal was restored
from a backup, it may be neither of the two. Then the line with the log's number is the right position.
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

from ...store.datadir import DataDirectory, lock, open_data_directory
from ...streams.private_files import make_directory, opener
from ...streams.publishing import ProducerSequence
from .lines import CHUNK_BYTES, LineFormat

if TYPE_CHECKING:
    from ...client.client import Client
    from ...silo.provider import Provider

_LOCKS = ".publish"


class JournalStore(Protocol):
    """Stores journals, and tells which sequence the log has."""

    @property
    def provider(self) -> str:
        """Name of the provider, part of a journal's key."""
        ...

    @property
    def addresses(self) -> Collection[str]:
        """Addresses of the silos. Empty for a data directory: all its journals belong to it."""
        ...

    async def entries(self, key: str) -> Mapping[str, str]:
        """The entries under a key, by the names to change them with."""
        ...

    def new_name(self, key: str) -> str:
        """A name for one more entry under a key."""
        ...

    async def set_value(self, key: str, value: str | None) -> None: ...

    async def last_sequence(self, producer: str) -> int: ...

    def lock(self, key: str, what: str) -> AbstractContextManager[object]:
        """Lock the file against other processes, which would take this process's lines for their own. Raises Busy."""
        ...


class ControlStoreJournals:
    """Journals in the control store of a data directory."""

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


class UserFileJournals:
    """Journals in files of this user, for a provider of the silos at `addresses`."""

    def __init__(self, client: Client, addresses: Collection[str]) -> None:
        """Raises OSError if the folder for this user's files cannot be used."""
        self.provider = client.provider
        self.addresses = addresses
        self.last_sequence = client.last_sequence
        self._folder = state_folder()
        make_directory(self._folder)

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
    """The name without slashes, for a file."""
    return name.replace("/", "-")


def state_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "headrace"


def _replace(path: Path, text: str) -> None:
    """Write a file so that after a crash it is the old one or the new one."""
    unfinished = path.with_suffix(".new")
    with open(unfinished, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


class FilePosition(msgspec.Struct, frozen=True):
    """A place between two lines of a file: the number of lines and bytes before it, and the digest of those bytes."""

    lines: int
    bytes: int
    digest: str


class JournalEntry(msgspec.Struct, frozen=True):
    """The stored content of a journal."""

    path: str
    producer: str
    done: FilePosition
    next: FilePosition
    addresses: Sequence[str] = ()
    """Addresses by which the silos have been named."""


class FoundEntry(NamedTuple):
    """The journal's entry for this cluster or data directory."""

    name: str
    entry: JournalEntry
    last: int
    """Number of the last line that the log has; 0 if the log does not know the producer."""

    @property
    def position(self) -> FilePosition:
        """The position in the journal up to which the file must not have changed."""
        return self.entry.next if self.entry.next.lines == self.last else self.entry.done

    @property
    def is_forgotten(self) -> bool:
        """Whether lines were published, and the log does not know their producer."""
        return self.last == 0 and self.entry.done.lines > 0


class FileReader:
    """Counts the lines and bytes of a file that have been read, and computes their digest."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._lines = self._bytes = 0

    def add(self, raw: bytes, lines: int) -> None:
        self._hash.update(raw)
        self._lines += lines
        self._bytes += len(raw)

    @property
    def position(self) -> FilePosition:
        return FilePosition(self._lines, self._bytes, self._hash.hexdigest())

    def move_to(self, descriptor: int, position: FilePosition) -> bool:
        """Read a file from its start up to `position`. Return False if it has changed, or no line ends there."""
        left, last = position.bytes, b"\n"
        while left and (chunk := os.read(descriptor, min(left, CHUNK_BYTES))):
            self.add(chunk, 0)
            left, last = left - len(chunk), chunk[-1:]
        self._lines = position.lines
        at_a_line = last == b"\n" or position.bytes == os.fstat(descriptor).st_size
        return self.position == position and at_a_line


def journal_key(provider: str, path: str, form: LineFormat) -> str:
    return hashlib.sha256(msgspec.json.encode((provider, path, asdict(form)))).hexdigest()


class PublishJournal:
    """The journal of one file, named by its real path."""

    def __init__(self, notes: JournalStore, path: str, form: LineFormat) -> None:
        self._notes = notes
        self.path = path
        self.key = journal_key(notes.provider, path, form)
        self._key = f"publish/{self.key}"
        self._name = notes.new_name(self._key)
        self._addresses = set(notes.addresses)
        self._producer = ""
        self._previous = 0
        self._done = FileReader().position

    async def stored(self) -> FoundEntry | None:
        """Return the entry of an earlier run; None if there is none. Call `published` to continue it."""
        found = await self._found()
        if found is not None:
            self._name = found.name
            self._producer = found.entry.producer
            self._addresses.update(found.entry.addresses)
        return found

    async def _found(self) -> FoundEntry | None:
        forgotten: FoundEntry | None = None
        for name, text in (await self._notes.entries(self._key)).items():
            entry = msgspec.json.decode(text, type=JournalEntry)
            found = FoundEntry(name, entry, await self._notes.last_sequence(entry.producer))
            if found.last:
                return found
            if not self._notes.addresses or self._addresses.intersection(entry.addresses):
                forgotten = found
        return forgotten

    def start_anew(self) -> None:
        self._producer, self._previous = uuid.uuid4().hex, 0
        self._done = FileReader().position

    async def intend(self, next_position: FilePosition) -> ProducerSequence:
        """Store that the lines up to `next_position` are about to be published. Return the sequence for the call."""
        await self._save(JournalEntry(self.path, self._producer, self._done, next_position, sorted(self._addresses)))
        return ProducerSequence(self._producer, next_position.lines, self._previous)

    def published(self, position: FilePosition) -> None:
        """Note that the log has the lines up to `position`, and no others."""
        self._done, self._previous = position, position.lines

    async def forget(self) -> None:
        """Delete the journal: the whole file is published."""
        await self._notes.set_value(self._name, None)

    def alone(self, file: Path) -> AbstractContextManager[object]:
        """Lock the file for a `with` block: no other process may publish it. Raises Busy."""
        return self._notes.lock(self.key, f"{str(file)!r} is being published already")

    async def _save(self, entry: JournalEntry) -> None:
        await self._notes.set_value(self._name, msgspec.json.encode(entry).decode())
