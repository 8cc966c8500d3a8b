"""Batches that wait until they are due, for queues that cannot delay: what a place for them promises, and the one in
the control store. Who publishes what is due is in `headrace.silo.parking`.

Into each queue one release goes after the other. A release is a number, above all before it also where the place lost
its last ones (the time in µs), the batches that are claimed under it, and who
holds it until when. It never changes once it is made: whoever finds that the time of its holder is over publishes the
same batches under the same number again, as the same idempotent producer, and the queue stores them once. Only then are
they deleted here, and the next release can be made. So neither a crash nor a process that goes on after it was believed
dead loses a batch or publishes one twice.
"""

from __future__ import annotations

import hashlib
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Table, and_, delete, func, insert, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from . import store_clock
from .database import Database
from .errors import InvalidArgument
from .events import EventBatch, ScheduledBatch
from .identity import StreamId
from .publishing import ProducerSequence
from .schema import parked, parked_calls, releases

Clock = Callable[[Connection], int]
"""Microseconds since 1970 UTC. Called within a transaction."""

RELEASE_BATCHES = 1000
"""Batches that are claimed at a time, over all queues."""
RELEASE_BYTES = 8 << 20
"""The same in bytes; one batch is claimed though it is larger."""
CALL_KEPT_S = 7 * 24 * 3600 - 3600
"""A producer that parked nothing for so long is forgotten, in seconds. Adapters remember producers for longer: what was
parked by a call that they have forgotten must not be taken for that of a failed one."""

_ROWS_AT_ONCE = 500  # below every database's limit of parameters
_TAKEN = text("claim > 0")  # as in the index, word for word


class ParkingCall(NamedTuple):
    """Batches that are parked together, each for the queue of the given index."""

    batches: Sequence[tuple[int, ScheduledBatch]]
    sequence: ProducerSequence | None


class Release(NamedTuple):
    """Batches that are due, to be published into their queue as call `number` of `producer`, and of nobody else."""

    queue: int
    producer: str
    number: int
    batches: Sequence[EventBatch]
    damage: str = ""
    """Why they cannot be published: one of them is damaged."""


class Waiting(NamedTuple):
    """What is parked for a queue."""

    batches: int
    events: int
    due_in_s: float
    """When the first of it is due; negative where it is late."""

    def plus(self, other: Waiting) -> Waiting:
        return Waiting(self.batches + other.batches, self.events + other.events, min(self.due_in_s, other.due_in_s))


class ParkingLot(ABC):
    """Where providers park batches. Each method is done as a whole or not at all, unless it says otherwise.

    Raises StorageError where the place cannot be reached or cannot store.
    """

    async def park(
        self, provider: str, batches: Sequence[tuple[int, ScheduledBatch]], sequence: ProducerSequence | None = None
    ) -> None:
        """One call of `park_all`."""
        await self.park_all(provider, [ParkingCall(batches, sequence)])

    @abstractmethod
    async def park_all(self, provider: str, calls: Sequence[ParkingCall]) -> None:
        """Keep batches, each for the queue of the given index, until their delay is over. Durable on return. Several
        calls at once, at most one of each producer.

        Of one with a sequence, nothing is kept where it was parked before. Who calls has seen that the call before it,
        `sequence.previous`, is the last one that the queues have of the producer: so what later ones parked is of calls
        that failed, and is deleted unless it is released already.
        """

    @abstractmethod
    async def due_in_s(self, provider: str, holder: str) -> float | None:
        """How long until there is something to claim; 0 where there is, None where nothing is parked."""

    @abstractmethod
    async def claim(
        self,
        provider: str,
        holder: str,
        hold_s: float,
        *,
        max_batches: int = RELEASE_BATCHES,
        max_bytes: int = RELEASE_BYTES,
    ) -> list[Release]:
        """Releases for `holder` to publish: those it has already, those whose holder's time is over, and new ones of
        what is due, in the order in which it is due. For `hold_s` nobody else gets them. Not all at once where they are
        many: the next claim has the others."""

    @abstractmethod
    async def released(self, provider: str, numbers: Mapping[int, int]) -> None:
        """Releases, given as number by queue, are stored in their queues: forget their batches."""

    @abstractmethod
    async def waiting(self, provider: str) -> dict[int, Waiting]:
        """What is parked, by queue."""

    @abstractmethod
    async def forget_calls(self, provider: str) -> None:
        """Forget the producers that parked nothing for long."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close what it has open. Idempotent."""


class ParkingStore(ParkingLot):
    """The parked batches of the providers that share a database.

    Every method is one transaction, and raises what `ControlStore`'s raise. `clock` takes the place of the store's own,
    for tests.
    """

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or store_clock.wall_us

    async def park_all(self, provider: str, calls: Sequence[ParkingCall]) -> None:
        ordered = sorted(calls, key=lambda call: "" if call.sequence is None else call.sequence.producer)
        await self._database.write(_park, self._clock, provider, ordered)

    async def due_in_s(self, provider: str, holder: str) -> float | None:
        return await self._database.read(_due_in_s, self._clock, provider, holder)

    async def claim(
        self,
        provider: str,
        holder: str,
        hold_s: float,
        *,
        max_batches: int = RELEASE_BATCHES,
        max_bytes: int = RELEASE_BYTES,
    ) -> list[Release]:
        limits = max_batches, max_bytes
        return await self._database.write(_claim, self._clock, provider, (holder, round(hold_s * 1e6)), limits)

    async def released(self, provider: str, numbers: Mapping[int, int]) -> None:
        await self._database.write(_released, provider, dict(numbers))

    async def waiting(self, provider: str) -> dict[int, Waiting]:
        """What is parked, by queue. It reads all of it."""
        return await self._database.read(_waiting, self._clock, provider)

    async def forget_calls(self, provider: str) -> None:
        await self._database.write(_forget_calls, self._clock, provider)

    async def aclose(self) -> None:
        """Nothing: the database is closed with the control store."""


def parked_batch(stream: str, encoded: bytes, events: int, priority: int) -> EventBatch:
    """A batch as it is published. Raises InvalidArgument where that is no stream."""
    if priority:
        return ScheduledBatch(StreamId.parse(stream), encoded, events, delay_us=0, priority=priority)
    return EventBatch(StreamId.parse(stream), encoded, events)


# What each method does within its transaction. Rows of `releases` are locked in the order of queues.


def _insert(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def _park(connection: Connection, clock: Clock, provider: str, calls: Sequence[ParkingCall]) -> None:
    now = clock(connection)
    rows: list[dict[str, Any]] = []
    for batches, call in calls:
        keys: dict[str, Any] = {"provider": provider, "claim": 0, "producer": "", "number": 0}
        if call is not None:
            keys |= {"producer": producer_key(call.producer), "number": call.number}
            if not _is_new(connection, keys, call, now):
                continue
        rows += [keys | _row(queue, batch, now) for queue, batch in batches]
    if rows:
        connection.execute(insert(parked), rows)


def _row(queue: int, batch: ScheduledBatch, now: int) -> dict[str, Any]:
    plain = batch.undelayed()
    return {
        "queue": queue,
        "due_at_us": now + batch.delay_us,
        "stream": str(batch.stream),
        "events": batch.count,
        "priority": batch.priority,
        "batch": plain.encoded,
    }


def producer_key(producer: str) -> str:
    """A producer's name, in which any character may be, as a key: 64 letters and digits."""
    return hashlib.sha256(producer.encode("utf-8", "surrogatepass")).hexdigest()


def _is_new(connection: Connection, keys: Mapping[str, Any], call: ProducerSequence, now: int) -> bool:
    """Note the call. False where it, or a later one, is noted already."""
    this = {"provider": keys["provider"], "producer": keys["producer"]}
    connection.execute(
        _insert(connection, parked_calls).values(this | {"number": 0, "at_us": now}).on_conflict_do_nothing()
    )
    is_this = and_(*(parked_calls.c[name] == value for name, value in this.items()))
    noted = connection.execute(select(parked_calls).where(is_this).with_for_update()).one()
    last = noted.number
    if noted.at_us < _forgotten_before(now):
        _keep_for_good(connection, keys["provider"], [keys["producer"]])
        last = 0
    if last >= call.number:
        return False
    if last > call.previous:
        failed = [parked.c[name] == value for name, value in this.items()]
        connection.execute(delete(parked).where(*failed, parked.c.number > call.previous, parked.c.claim == 0))
    connection.execute(update(parked_calls).where(is_this).values(number=call.number, at_us=now))
    return True


def _forgotten_before(now: int) -> int:
    return now - CALL_KEPT_S * 1_000_000


def _keep_for_good(connection: Connection, provider: str, producers: Sequence[str]) -> None:
    """What these producers parked, none of their later calls takes back."""
    theirs = and_(parked.c.provider == provider, parked.c.producer.in_(producers))
    connection.execute(update(parked).where(theirs).values(producer="", number=0))


def _due_in_s(connection: Connection, clock: Clock, provider: str, holder: str) -> float | None:
    now = clock(connection)
    times = list[int]()
    held = set[int]()
    for slot in connection.execute(select(releases).where(releases.c.provider == provider, releases.c.until_us > 0)):
        times.append(now if slot.holder == holder else slot.until_us)
        held.add(slot.queue)
    first = select(parked.c.due_at_us).where(_unclaimed(provider, held)).order_by(parked.c.due_at_us, parked.c.id)
    due = connection.execute(first.limit(1)).scalar()
    times += [] if due is None else [due]
    return max(min(times) - now, 0) / 1e6 if times else None


def _unclaimed(provider: str, held: Collection[int]) -> ColumnElement[bool]:
    """Rows that no release has, of queues without one."""
    free = and_(parked.c.provider == provider, parked.c.claim == 0)
    return and_(free, parked.c.queue.not_in(sorted(held))) if held else free


def _claim(
    connection: Connection, clock: Clock, provider: str, holder: tuple[str, int], limits: tuple[int, int]
) -> list[Release]:
    now = clock(connection)
    unfinished = select(releases).where(releases.c.provider == provider, releases.c.until_us > 0)
    locked = list(connection.execute(unfinished.order_by(releases.c.queue).with_for_update()))
    mine = [slot for slot in locked if slot.holder == holder[0] or slot.until_us <= now]
    found = [_hold(connection, slot, slot.claim, holder, now) for slot in mine]
    due = _due(connection, provider, {slot.queue for slot in locked}, now, limits)
    for queue in sorted(due):
        slot = _free_slot(connection, provider, queue)
        if slot is None:
            continue
        number = max(slot.claim + 1, now)
        if _take(connection, due[queue], number):
            found.append(_hold(connection, slot, number, holder, now))
    return found


def _due(
    connection: Connection, provider: str, held: Collection[int], now: int, limits: tuple[int, int]
) -> Mapping[int, Sequence[int]]:
    """Ids of what is due, by queue."""
    query = select(parked.c.id, parked.c.queue, func.length(parked.c.batch).label("size"))
    query = query.where(_unclaimed(provider, held), parked.c.due_at_us <= now)
    rows = connection.execute(query.order_by(parked.c.due_at_us, parked.c.id).limit(limits[0])).all()
    by_queue: defaultdict[int, list[int]] = defaultdict(list)
    for row in _within(rows, limits[1]):
        by_queue[row.queue].append(row.id)
    return by_queue


def _within(rows: Iterable[Any], max_bytes: int) -> Iterable[Any]:
    """The first ones that have no more bytes together, at least one."""
    total = 0
    for row in rows:
        if total and total + row.size > max_bytes:
            return
        total += row.size
        yield row


def _free_slot(connection: Connection, provider: str, queue: int) -> Row[Any] | None:
    """The queue's row in `releases`, locked; None where somebody was faster and has a release."""
    new = {"provider": provider, "queue": queue, "producer": f"delays {uuid.uuid4().hex}"}
    new |= {"claim": 0, "holder": "", "until_us": 0}
    connection.execute(_insert(connection, releases).values(new).on_conflict_do_nothing())
    slot = connection.execute(select(releases).where(_is_slot(provider, queue)).with_for_update()).one()
    return None if slot.until_us else slot


def _is_slot(provider: str, queue: int) -> ColumnElement[bool]:
    return and_(releases.c.provider == provider, releases.c.queue == queue)


def _take(connection: Connection, ids: Sequence[int], number: int) -> int:
    """How many of the rows are still there, and have this number now."""
    chunks = [ids[at : at + _ROWS_AT_ONCE] for at in range(0, len(ids), _ROWS_AT_ONCE)]
    take = update(parked).values(claim=number)
    return sum(connection.execute(take.where(parked.c.id.in_(chunk), parked.c.claim == 0)).rowcount for chunk in chunks)


def _hold(connection: Connection, slot: Row[Any], number: int, holder: tuple[str, int], now: int) -> Release:
    name, hold_us = holder
    values = {"claim": number, "holder": name, "until_us": now + hold_us}
    connection.execute(update(releases).where(_is_slot(slot.provider, slot.queue)).values(values))
    rows = connection.execute(
        select(parked).where(_taken(slot.provider, slot.queue, number)).order_by(parked.c.due_at_us, parked.c.id)
    )
    try:
        batches = [parked_batch(row.stream, row.batch, row.events, row.priority) for row in rows]
    except InvalidArgument as error:
        damage = f"a parked batch in the control store is damaged ({error}); restore it from a copy"
        return Release(slot.queue, slot.producer, number, [], damage)
    return Release(slot.queue, slot.producer, number, batches)


def _taken(provider: str, queue: int, number: int) -> ColumnElement[bool]:
    return and_(_TAKEN, parked.c.provider == provider, parked.c.queue == queue, parked.c.claim == number)


def _released(connection: Connection, provider: str, numbers: Mapping[int, int]) -> None:
    for queue, number in sorted(numbers.items()):
        this = and_(_is_slot(provider, queue), releases.c.claim == number)
        connection.execute(update(releases).where(this).values(until_us=0))
        connection.execute(delete(parked).where(_taken(provider, queue, number)))


def _waiting(connection: Connection, clock: Clock, provider: str) -> dict[int, Waiting]:
    now = clock(connection)
    due = func.min(parked.c.due_at_us).label("due")
    query = select(parked.c.queue, func.count().label("batches"), func.sum(parked.c.events).label("events"), due)
    rows = connection.execute(query.where(parked.c.provider == provider).group_by(parked.c.queue))
    return {row.queue: Waiting(row.batches, int(row.events), (row.due - now) / 1e6) for row in rows}


def _forget_calls(connection: Connection, clock: Clock, provider: str) -> None:
    old = and_(parked_calls.c.provider == provider, parked_calls.c.at_us < _forgotten_before(clock(connection)))
    producers = connection.execute(select(parked_calls.c.producer).where(old).with_for_update()).scalars().all()
    for at in range(0, len(producers), _ROWS_AT_ONCE):
        some = producers[at : at + _ROWS_AT_ONCE]
        _keep_for_good(connection, provider, some)
        gone = and_(parked_calls.c.provider == provider, parked_calls.c.producer.in_(some))
        connection.execute(delete(parked_calls).where(gone))
