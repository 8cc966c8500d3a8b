"""The state of subscriptions, from the control store of a data directory or from a silo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol
from zlib import crc32

from ...client.management import ManagementClient
from ...store.control_store import ControlStore
from ...store.datadir import open_data_directory
from ...streams.errors import NotFound
from ...streams.identity import SequenceToken, StreamId
from ...streams.states import QueueProgress
from ...streams.subscriptions import (
    Checkpoint,
    DeadLetter,
    GapRecord,
    StreamBehind,
    SubscriptionDefinition,
    is_parent,
    is_position_of,
)
from ..place import CONNECT_S, ProviderPlace, as_options

CALL_S = 60.0
_LETTERS_AT_ONCE = 1000


class LetterIdentity(NamedTuple):
    """The event of a dead letter. A queue that lost its end gives positions again, to other events."""

    queue: int
    token: SequenceToken
    timestamp_us: int
    checksum: int
    """CRC-32 of the payload."""

    @classmethod
    def of(cls, letter: DeadLetter) -> LetterIdentity:
        return cls(letter.queue, letter.token, letter.timestamp_us, crc32(letter.payload))


class SubscriptionSnapshot(NamedTuple):
    """A subscription with its checkpoints, dead letters and gap records."""

    definition: SubscriptionDefinition
    checkpoints: Mapping[int, Checkpoint]
    letters: Mapping[LetterIdentity, str]
    """The dead letters with their reasons."""
    gaps: Sequence[GapRecord]
    exact: bool = True
    """False: only the lowest position of the streams that are behind is known, so `checkpoints` are lower bounds."""

    @property
    def name(self) -> str:
        return self.definition.name

    def done_to(self, queue: int) -> SequenceToken:
        """Return the token below which all events of a queue are done, except those of streams that are behind."""
        at = self.checkpoints.get(queue)
        return SequenceToken(0 if at is None else at.next_offset)


async def read_snapshots(place: ProviderPlace, names: Sequence[str]) -> list[SubscriptionSnapshot]:
    """Read the state of these subscriptions, or of all. In mode broadcast, each consumer has a state of its own.

    Raise NotFound for an unknown name.
    """
    if place.data is not None:
        store = await ControlStore.open(open_data_directory(place.data).control_db)
        try:
            return await _read(_StoredSubscriptions(store, place.provider), names)
        finally:
            await store.aclose()
    connection = place.connection()
    with as_options():
        await connection.open(CONNECT_S)
        try:
            return await _read(_SiloSubscriptions(ManagementClient(connection, place.provider, CALL_S)), names)
        finally:
            await connection.aclose()


class _SubscriptionReader(Protocol):
    async def definitions(self) -> Sequence[SubscriptionDefinition]: ...

    async def definition(self, name: str) -> SubscriptionDefinition: ...

    async def checkpoints(self, name: str) -> tuple[Mapping[int, Checkpoint], bool]:
        """Return the checkpoints by queue, and whether they are exact."""
        ...

    async def letters(self, name: str, after_id: int) -> Sequence[DeadLetter]: ...

    async def gaps(self, name: str) -> Sequence[GapRecord]: ...


async def _read(reader: _SubscriptionReader, names: Sequence[str]) -> list[SubscriptionSnapshot]:
    every = await reader.definitions()
    wanted = every if not names else [await reader.definition(name) for name in dict.fromkeys(names)]
    chosen: dict[str, SubscriptionDefinition] = {}
    for one in wanted:
        of_one = _of_consumers(one, every) if is_parent(one) else [one]
        if names and not of_one:
            raise NotFound(
                f"subscription {one.name!r}: no position of a consumer is known here; if they are stored, read "
                "them from the data directory: a silo does not send them"
            )
        chosen |= {each.name: each for each in of_one}
    return [await _snapshot(reader, one) for one in chosen.values()]


def _of_consumers(
    parent: SubscriptionDefinition, every: Sequence[SubscriptionDefinition]
) -> list[SubscriptionDefinition]:
    return [one for one in every if is_position_of(one.name, parent.name)]


async def _snapshot(reader: _SubscriptionReader, definition: SubscriptionDefinition) -> SubscriptionSnapshot:
    """Read the checkpoints first: a dead letter is stored before the checkpoint that is past it."""
    checkpoints, exact = await reader.checkpoints(definition.name)
    letters: dict[LetterIdentity, str] = {}
    last = 0
    while more := await reader.letters(definition.name, last):
        letters |= {LetterIdentity.of(one): one.reason for one in more}
        last = more[-1].id
    return SubscriptionSnapshot(definition, checkpoints, letters, await reader.gaps(definition.name), exact)


class _StoredSubscriptions:
    """The subscriptions of a control store."""

    def __init__(self, store: ControlStore, provider: str) -> None:
        self._store = store
        self._provider = provider

    async def definitions(self) -> Sequence[SubscriptionDefinition]:
        return await self._store.subscriptions(self._provider)

    async def definition(self, name: str) -> SubscriptionDefinition:
        return await self._store.subscription(self._provider, name)

    async def checkpoints(self, name: str) -> tuple[Mapping[int, Checkpoint], bool]:
        return await self._store.checkpoints(self._provider, name), True

    async def letters(self, name: str, after_id: int) -> Sequence[DeadLetter]:
        return await self._store.dead_letters(self._provider, name, limit=_LETTERS_AT_ONCE, after_id=after_id)

    async def gaps(self, name: str) -> Sequence[GapRecord]:
        return await self._store.gaps(self._provider, name)


class _SiloSubscriptions:
    """The subscriptions of a silo."""

    def __init__(self, silo: ManagementClient) -> None:
        self._silo = silo
        self.definitions = silo.subscriptions

    async def definition(self, name: str) -> SubscriptionDefinition:
        return (await self._silo.subscription(name)).definition

    async def checkpoints(self, name: str) -> tuple[Mapping[int, Checkpoint], bool]:
        progress = (await self._silo.subscription(name)).progress
        return {one.queue: checkpoint_of(one) for one in progress}, not any(one.streams_behind for one in progress)

    async def letters(self, name: str, after_id: int) -> Sequence[DeadLetter]:
        return await self._silo.dead_letters(name, limit=_LETTERS_AT_ONCE, after_id=after_id)

    async def gaps(self, name: str) -> Sequence[GapRecord]:
        return await self._silo.gaps(name)


def checkpoint_of(progress: QueueProgress) -> Checkpoint:
    """Return the certain part of a silo's answer: it names paused streams, but no others that are behind."""
    if progress.streams_behind != len(progress.paused):
        return Checkpoint(progress.watermark)
    lowest = SequenceToken(progress.watermark)
    behind: dict[StreamId, StreamBehind] = {
        stream: StreamBehind(lowest, why) for stream, why in progress.paused.items()
    }
    return Checkpoint(progress.next_offset, behind)
