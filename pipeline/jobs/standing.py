"""How subscriptions stand: what the control store of a data directory has of them, or a silo tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ...silo.datadir import open_data_directory
from ...streams.client.management import Management
from ...streams.errors import NotFound
from ...streams.identity import SequenceToken, StreamId
from ...streams.states import QueueProgress
from ...streams.store import ControlStore
from ...streams.subscriptions import (
    CONSUMER_SEPARATOR,
    Behind,
    Checkpoint,
    DeadLetter,
    GapRecord,
    SubscriptionDefinition,
    is_parent,
)
from ..place import CONNECT_S, Place, as_options

CALL_S = 60.0
_LETTERS_AT_ONCE = 1000


class Standing(NamedTuple):
    """A subscription, what it is done with, and what it gave up on."""

    definition: SubscriptionDefinition
    checkpoints: Mapping[int, Checkpoint]
    letters: Sequence[tuple[int, int, int, str]]
    """Queue, offset and index of each dead letter, and its reason."""
    gaps: Sequence[GapRecord]
    exact: bool = True
    """False where only the lowest position of the streams that are behind is known: `checkpoints` say less then."""

    @property
    def name(self) -> str:
        return self.definition.name

    def done_to(self, queue: int) -> SequenceToken:
        """Everything below is done in a queue, but for the streams that are behind."""
        at = self.checkpoints.get(queue)
        return SequenceToken(0 if at is None else at.next_offset)


async def read_standings(place: Place, names: Sequence[str]) -> list[Standing]:
    """Those of these subscriptions, or of all. With mode broadcast they are those of the consumers.

    Raises NotFound for a name that is not there.
    """
    if place.data is not None:
        store = await ControlStore.open(open_data_directory(place.data).control_db)
        try:
            return await _read(_Stored(store, place.provider), names)
        finally:
            await store.aclose()
    connection = place.connection()
    with as_options():
        await connection.open(CONNECT_S)
        try:
            return await _read(_Told(Management(connection, place.provider, CALL_S)), names)
        finally:
            await connection.aclose()


class _Subscriptions(Protocol):
    async def definitions(self) -> Sequence[SubscriptionDefinition]: ...

    async def definition(self, name: str) -> SubscriptionDefinition: ...

    async def checkpoints(self, name: str) -> tuple[Mapping[int, Checkpoint], bool]:
        """And whether they are exact."""
        ...

    async def letters(self, name: str, after_id: int) -> Sequence[DeadLetter]: ...

    async def gaps(self, name: str) -> Sequence[GapRecord]: ...


async def _read(there: _Subscriptions, names: Sequence[str]) -> list[Standing]:
    every = await there.definitions()
    wanted = every if not names else [await there.definition(name) for name in dict.fromkeys(names)]
    chosen: dict[str, SubscriptionDefinition] = {}
    for one in wanted:
        of_one = _of_consumers(one, every) if is_parent(one) else [one]
        if names and not of_one:
            raise NotFound(
                f"subscription {one.name!r}: no position of a consumer is known here; where they are kept for them, "
                "the data directory has them, and a silo does not tell"
            )
        chosen |= {each.name: each for each in of_one}
    return [await _standing(there, one) for one in chosen.values()]


def _of_consumers(
    parent: SubscriptionDefinition, every: Sequence[SubscriptionDefinition]
) -> list[SubscriptionDefinition]:
    return [one for one in every if one.name.startswith(f"{parent.name}{CONSUMER_SEPARATOR}")]


async def _standing(there: _Subscriptions, definition: SubscriptionDefinition) -> Standing:
    """First the checkpoints: what is given up on was stored before a checkpoint that is past it."""
    checkpoints, exact = await there.checkpoints(definition.name)
    letters: list[tuple[int, int, int, str]] = []
    last = 0
    while more := await there.letters(definition.name, last):
        letters += [(one.queue, one.token.offset, one.token.index, one.reason) for one in more]
        last = more[-1].id
    return Standing(definition, checkpoints, letters, await there.gaps(definition.name), exact)


class _Stored:
    """In a control store."""

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


class _Told:
    """By a silo."""

    def __init__(self, silo: Management) -> None:
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
    """What is certain of it: the streams that are paused are named, others that are behind are not."""
    if progress.streams_behind != len(progress.paused):
        return Checkpoint(progress.watermark)
    lowest = SequenceToken(progress.watermark)
    behind: dict[StreamId, Behind] = {stream: Behind(lowest, why) for stream, why in progress.paused.items()}
    return Checkpoint(progress.next_offset, behind)
