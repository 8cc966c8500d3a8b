"""Batches that wait in a Redis until they are due, for the queues of adapters that cannot delay."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ...streams.errors import InvalidArgument, StorageError
from ...streams.events import EventBatch, ScheduledBatch
from ...streams.parking import (
    CALL_KEPT_S,
    RELEASE_BATCHES,
    RELEASE_BYTES,
    ParkingCall,
    ParkingLot,
    Release,
    Waiting,
    parked_batch,
    producer_key,
)
from .keys import check_name
from .parking_scripts import PARKING_SCRIPTS, ParkingScripts
from .scripts import Script
from .server import Server, ServerAway, log

PREFIX = "headrace"
"""What all keys begin with."""
SCRIPT_BATCHES = 1000
"""One script takes no more, except for a call with a sequence, which is parked as a whole."""

_KEPT_US = CALL_KEPT_S * 1_000_000

_Body = tuple[str, int, int, bytes]
"""Stream, events, priority and the encoded batch."""


class ParkingKeys(NamedTuple):
    """In the order in which the scripts get them. Those that belong to a queue or a producer they make from these."""

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
    def of(cls, prefix: str, provider: str) -> ParkingKeys:
        """Keys that share a hash tag, and so a slot of Redis Cluster."""
        tag = f"{{{prefix}:{check_name('provider', provider)}:delays}}"
        return cls(*(f"{tag}{name}" for name in cls._fields))


class RedisParking(ParkingLot):
    """What is parked in one Redis. Each method is one script, except that many calls without a sequence are several.

    `owner` tells providers of one name apart: what one has parked, no other gets. "" is told apart from nobody.
    Raises ServerAway where the server does not answer; whether it has done it is then not known. Everything may be
    called again.
    """

    def __init__(
        self, url: str, *, owner: str = "", prefix: str = PREFIX, scripts: ParkingScripts = PARKING_SCRIPTS
    ) -> None:
        self._server = Server(url)
        self._owner = owner
        self._prefix = prefix
        self._scripts = scripts
        self._checked = False

    async def check(self, provider: str) -> None:
        """Raises InvalidArgument where the server will not do, or has another provider's batches under this name.

        Where it is away, that is logged, and found out later.
        """
        try:
            self._mine(provider, await self._run(provider, self._scripts.own, self._owner))
        except ServerAway as error:
            log.warning("provider %s: delayed events cannot be parked yet: %s", provider, error)

    async def park_all(self, provider: str, calls: Sequence[ParkingCall]) -> None:
        """As `ParkingLot` says. Where this fails, some of the calls may be parked; of those without a sequence, also
        a part."""
        for arguments in _in_pieces(calls):
            try:
                reply = await self._run(provider, self._scripts.park, self._owner, _KEPT_US, *arguments)
            except ServerAway as error:
                raise StorageError(f"{error}; what is delayed may or may not be stored") from None
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

    async def waiting(self, provider: str) -> dict[int, Waiting]:
        reply = await self._run(provider, self._scripts.waiting)
        return {int(queue): Waiting(batches, int(events), int(due) / 1e6) for queue, batches, events, due in reply}

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
        return await self._server.run(script, ParkingKeys.of(self._prefix, provider), *args)

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
                f"a parked batch in Redis at {self._server.address} is damaged ({error}); restore its data from a copy"
            )
            return Release(queue, producer, number, [], damage)


def _batch_of(body: bytes | None) -> EventBatch:
    stream, events, priority, encoded = msgspec.msgpack.decode(body or b"", type=_Body)
    return parked_batch(stream, encoded, events, priority)


def _in_pieces(calls: Sequence[ParkingCall]) -> Iterator[list[str | bytes | int]]:
    """The arguments of one script after the other."""
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


def _cut(calls: Sequence[ParkingCall]) -> Iterator[ParkingCall]:
    """Those without a sequence may be cut."""
    for batches, sequence in calls:
        step = SCRIPT_BATCHES if sequence is None else max(len(batches), 1)
        for at in range(0, max(len(batches), 1), step):
            yield ParkingCall(batches[at : at + step], sequence)


def _arguments(call: ParkingCall) -> list[str | bytes | int]:
    batches, sequence = call
    arguments: list[str | bytes | int] = ["", "", ""]
    if sequence is not None:
        arguments = [producer_key(sequence.producer), _number(sequence.number), _number(sequence.previous)]
    arguments.append(len(batches))
    for queue, batch in batches:
        arguments += [queue, batch.delay_us, batch.count, *_body(batch)]
    return arguments


def _number(number: int) -> str:
    """As a text that sorts as the number does."""
    return f"{number:020}"


def _body(batch: ScheduledBatch) -> tuple[int, bytes]:
    """How many bytes count, and the bytes."""
    encoded = batch.undelayed().encoded
    return len(encoded), msgspec.msgpack.encode((str(batch.stream), batch.count, batch.priority, encoded))
