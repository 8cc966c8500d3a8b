"""Batches that wait in a Redis until they are due, for the queues of adapters that cannot delay."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ...store.delays import (
    CALL_KEPT_S,
    RELEASE_BATCHES,
    RELEASE_BYTES,
    DelayedBacklog,
    DelayedCall,
    DelayStore,
    Release,
    due_batch,
    producer_key,
)
from ...streams.errors import InvalidArgument, StorageError
from ...streams.events import EventBatch, ScheduledBatch
from .delay_scripts import DELAY_SCRIPTS, DelayScripts
from .keys import check_name
from .scripts import Script
from .server import RedisConnection, ServerAway, log

PREFIX = "headrace"
"""The beginning of all keys."""
SCRIPT_BATCHES = 1000
"""The maximum of batches in one script. A call with a sequence may have more: it is stored as a whole."""

_KEPT_US = CALL_KEPT_S * 1_000_000

_Body = tuple[str, int, int, bytes]
"""Stream, events, priority and the encoded batch."""


class DelayKeys(NamedTuple):
    """The keys, in the order of the scripts. Scripts derive the keys of queues and producers from these."""

    meta: str
    next: str
    held: str
    releases: str
    body: str
    caller: str
    calls: str
    called: str
    events: str

    @classmethod
    def of(cls, prefix: str, provider: str) -> DelayKeys:
        """Return keys that share a hash tag, and therefore a slot of Redis Cluster."""
        tag = f"{{{prefix}:{check_name('provider', provider)}:delays}}"
        return cls(*(f"{tag}{name}" for name in cls._fields))


class RedisDelayStore(DelayStore):
    """The delayed batches in one Redis. Each method runs one script, except that many calls without a sequence take
    several.

    `owner` distinguishes providers of one name: no provider gets the batches of another owner. "" matches every owner.
    Raises ServerAway if the server does not answer; it may have carried out the script. Every method may be called
    again.
    """

    def __init__(
        self, url: str, *, owner: str = "", prefix: str = PREFIX, scripts: DelayScripts = DELAY_SCRIPTS
    ) -> None:
        self._server = RedisConnection(url)
        self._owner = owner
        self._prefix = prefix
        self._scripts = scripts
        self._checked = False

    async def check(self, provider: str) -> None:
        """Raise InvalidArgument if the server is unsuitable, or has another provider's batches under this name.

        If the server is away, that is logged, and the check follows with a later call.
        """
        try:
            self._mine(provider, await self._run(provider, self._scripts.own, self._owner))
        except ServerAway as error:
            log.warning("provider %s: delayed events cannot be stored yet: %s", provider, error)

    async def add_all(self, provider: str, calls: Sequence[DelayedCall]) -> None:
        """See `DelayStore`. If this fails, some of the calls may be stored, and calls without a sequence also in
        part."""
        for arguments in _in_pieces(calls):
            try:
                reply = await self._run(provider, self._scripts.add, self._owner, _KEPT_US, *arguments)
            except ServerAway as error:
                raise StorageError(f"{error}; the delayed events may or may not be stored") from None
            self._mine(provider, reply)

    async def due_in_s(self, provider: str, holder: str) -> float | None:
        due_in_us = int(await self._run(provider, self._scripts.due_in, holder))
        return None if due_in_us < 0 else due_in_us / 1e6

    async def claim(
        self,
        provider: str,
        holder: str,
        hold_s: float,
        *,
        max_batches: int = RELEASE_BATCHES,
        max_bytes: int = RELEASE_BYTES,
    ) -> list[Release]:
        limits = min(max_batches, SCRIPT_BATCHES), max_bytes
        name = f"delays {uuid.uuid4().hex}"
        hold_us = round(hold_s * 1e6)
        reply = await self._run(provider, self._scripts.claim, self._owner, holder, hold_us, *limits, name)
        self._mine(provider, reply)
        return [
            self._release(int(queue), producer.decode(), int(number), bodies)
            for queue, producer, number, bodies in reply
        ]

    async def released(self, provider: str, numbers: Mapping[int, int]) -> None:
        if numbers:
            await self._run(provider, self._scripts.released, *(part for each in numbers.items() for part in each))

    async def backlogs(self, provider: str) -> dict[int, DelayedBacklog]:
        reply = await self._run(provider, self._scripts.waiting)
        return {
            int(queue): DelayedBacklog(batches, int(events), int(due) / 1e6) for queue, batches, events, due in reply
        }

    async def forget_calls(self, provider: str) -> None:
        forgotten = SCRIPT_BATCHES
        while forgotten == SCRIPT_BATCHES:
            forgotten = await self._run(provider, self._scripts.forget, _KEPT_US, SCRIPT_BATCHES)

    async def aclose(self) -> None:
        await self._server.aclose()

    async def _run(self, provider: str, script: Script, *args: str | bytes | float) -> Any:
        if not self._checked:
            await self._server.check()
            self._checked = True
        return await self._server.run(script, DelayKeys.of(self._prefix, provider), *args)

    def _mine(self, provider: str, reply: Any) -> None:
        if reply is None:
            raise InvalidArgument(
                f"Redis at {self._server.address} has the delayed events of another provider {provider!r}, with other "
                "control data: name another of its databases, as in redis://host:6379/1"
            )

    def _release(self, queue: int, producer: str, number: int, bodies: Sequence[bytes | None]) -> Release:
        try:
            return Release(queue, producer, number, list(map(_batch_of, bodies)))
        except (msgspec.DecodeError, InvalidArgument) as error:
            damage = (
                f"a delayed batch in Redis at {self._server.address} is damaged ({error}); restore its data from a copy"
            )
            return Release(queue, producer, number, [], damage)


def _batch_of(body: bytes | None) -> EventBatch:
    stream, events, priority, encoded = msgspec.msgpack.decode(body or b"", type=_Body)
    return due_batch(stream, encoded, events, priority)


def _in_pieces(calls: Sequence[DelayedCall]) -> Iterator[list[str | bytes | int]]:
    """Yield the arguments of each script."""
    arguments: list[str | bytes | int] = []
    batches = nbytes = 0
    for call in _cut(calls):
        size = sum(len(batch.encoded) for _, batch in call.batches)
        if arguments and (batches + len(call.batches) > SCRIPT_BATCHES or nbytes + size > RELEASE_BYTES):
            yield arguments
            arguments, batches, nbytes = [], 0, 0
        arguments += _arguments(call)
        batches, nbytes = batches + len(call.batches), nbytes + size
    if arguments:
        yield arguments


def _cut(calls: Sequence[DelayedCall]) -> Iterator[DelayedCall]:
    """Split calls without a sequence into parts of the maximum size."""
    for batches, sequence in calls:
        step = SCRIPT_BATCHES if sequence is None else max(len(batches), 1)
        for at in range(0, max(len(batches), 1), step):
            yield DelayedCall(batches[at : at + step], sequence)


def _arguments(call: DelayedCall) -> list[str | bytes | int]:
    batches, sequence = call
    arguments: list[str | bytes | int] = ["", "", ""]
    if sequence is not None:
        arguments = [producer_key(sequence.producer), _number(sequence.number), _number(sequence.previous)]
    arguments.append(len(batches))
    for queue, batch in batches:
        arguments += [queue, batch.delay_us, batch.count, *_body(batch)]
    return arguments


def _number(number: int) -> str:
    """Return a text that sorts as the number does."""
    return f"{number:020}"


def _body(batch: ScheduledBatch) -> tuple[int, bytes]:
    """Return the size for the limits, in bytes, and the stored bytes."""
    encoded = batch.undelayed().encoded
    return len(encoded), msgspec.msgpack.encode((str(batch.stream), batch.count, batch.priority, encoded))
