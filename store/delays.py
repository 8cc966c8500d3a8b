"""The store of delayed batches, for queues that cannot delay: a part of the control store. `headrace.silo.delays`
publishes the batches when they are due.

Each queue gets one release after the other. A release has a number, the batches that are claimed under it, a holder and
the end of the holder's time. The number is the time in µs, or one more than the last number if that is higher: so it
rises even if the store lost its last releases. A release never changes. When the holder's time is over, another process
publishes the same batches under the same number, as the same idempotent producer, and the queue stores them once. Only
then the batches are deleted here, and the next release can be made. So neither a crash, nor a process that was believed
dead and goes on, loses a batch or publishes it twice.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, insert, select, text, update

from ..streams.errors import DataDirectoryError, InvalidArgument
from ..streams.events import EventBatch, ScheduledBatch
from ..streams.identity import StreamId
from ..streams.producer_ledger import LastCall
from ..streams.publishing import ProducerSequence
from . import store_clock
from .checksums import check_row, with_checksum
from .database import Database
from .schema import delayed_batches, delayed_calls, releases
from .store_clock import Clock
from .store_part import insert_into

_log = logging.getLogger(__name__)

RELEASE_BATCHES = 1000
"""The most batches of one claim, over all queues."""
RELEASE_BYTES = 8 << 20
"""The most bytes of one claim. A single larger batch is claimed alone."""
CALL_KEPT_S = 7 * 24 * 3600 - 3600
"""Seconds after which a producer without new delayed events is forgotten. Adapters remember producers for longer:
otherwise the delayed events of a call that the adapter forgot would count as those of a failed call."""

_ROWS_AT_ONCE = 500  # below every database's limit of parameters
_TAKEN = text("claim > 0")  # the same text as in the index
_columns = delayed_batches.c
_DAMAGED = -1
"""The claim number of a damaged row. No release gets the row."""


class DelayedCall(NamedTuple):
    """Batches that are stored together, each with the index of its queue."""

    batches: Sequence[tuple[int, ScheduledBatch]]
    sequence: ProducerSequence | None


class DelayRelease(NamedTuple):
    """Batches that are due. They are published into their queue as call `number` of `producer`, by the holder only."""

    queue: int
    producer: str
    number: int
    batches: Sequence[EventBatch]
    damage: str = ""
    """The reason why the batches cannot be published, if one of them is damaged; else ""."""


class DelayedBacklog(NamedTuple):
    """The number of delayed batches of a queue, and of their events."""

    batches: int
    events: int
    due_in_s: float
    """Seconds until the first batch is due; negative if it is late."""


class DelayStore:
    """The delayed batches of the providers that share a database.

    Every method is one transaction, and raises the errors of `ControlStore`. Tests pass a `clock` that replaces the
    store's own.
    """

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or store_clock.wall_us

    @property
    def private(self) -> bool:
        """Whether no other process has the store."""
        return self._database.private

    async def add_all(self, provider: str, calls: Sequence[DelayedCall]) -> None:
        """Store the batches of several calls until their delay is over. Durable on return. At most one call of each
        producer is given.

        A call with a sequence that was stored before is ignored. The caller has checked that the call before it,
        `sequence.previous`, is the producer's last call in the queues. So batches of later calls are of calls that
        failed, and are deleted unless they are released already.
        """
        ordered = sorted(calls, key=lambda call: "" if call.sequence is None else call.sequence.producer)
        await self._database.write(_add, self._clock, provider, ordered)

    async def due_in_s(self, provider: str, holder: str) -> float | None:
        """Return the seconds until there is a release to claim: 0 if there is one, None if there are no batches."""
        return await self._database.read(_due_in_s, self._clock, provider, holder)

    async def claim(
        self,
        provider: str,
        holder: str,
        hold_s: float,
        *,
        max_batches: int = RELEASE_BATCHES,
        max_bytes: int = RELEASE_BYTES,
    ) -> list[DelayRelease]:
        """Return releases for `holder` to publish: those that it holds, those whose holder's time is over, and new ones
        of batches that are due, in the order of due times. No other holder gets them for `hold_s` seconds. If there
        are many, the next claim returns the others."""
        limits = max_batches, max_bytes
        return await self._database.write(_claim, self._clock, provider, (holder, round(hold_s * 1e6)), limits)

    async def released(self, provider: str, numbers: Mapping[int, int]) -> None:
        """Delete the batches of releases, given as number by queue, that are stored in their queues."""
        await self._database.write(_released, provider, dict(numbers))

    async def backlogs(self, provider: str) -> dict[int, DelayedBacklog]:
        """Return the backlogs of delayed batches, by queue. It reads all rows of the provider."""
        return await self._database.read(_waiting, self._clock, provider)

    async def forget_calls(self, provider: str) -> None:
        """Forget the producers that stored no delayed events for `CALL_KEPT_S`."""
        await self._database.write(_forget_calls, self._clock, provider)


def due_batch(stream: str, encoded: bytes, events: int, priority: int) -> EventBatch:
    """Return the batch to publish, without a delay. Raises InvalidArgument if `stream` is no stream."""
    if priority:
        return ScheduledBatch(StreamId.parse(stream), encoded, events, delay_us=0, priority=priority)
    return EventBatch(StreamId.parse(stream), encoded, events)


# The work of each method, within its transaction. Rows of `releases` are locked in the order of queues.


def _add(connection: Connection, clock: Clock, provider: str, calls: Sequence[DelayedCall]) -> None:
    now = clock(connection)
    rows: list[dict[str, Any]] = []
    for batches, call in calls:
        keys: dict[str, Any] = {"provider": provider, "claim": 0, "producer": "", "number": 0}
        if call is not None:
            keys |= {"producer": producer_key(call.producer), "number": call.number}
            if not _is_new(connection, keys, call, now):
                continue
        rows += [with_checksum("delayed_batches", keys | _row(queue, batch, now)) for queue, batch in batches]
    if rows:
        connection.execute(insert(delayed_batches), rows)


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
    """Return a key of 64 letters and digits for a producer's name, which may have any characters."""
    return hashlib.sha256(producer.encode("utf-8", "surrogatepass")).hexdigest()


def _is_new(connection: Connection, keys: Mapping[str, Any], call: ProducerSequence, now: int) -> bool:
    """Store the number of the call. Return False if this call, or a later one, is stored already."""
    this = {"provider": keys["provider"], "producer": keys["producer"]}
    connection.execute(
        insert_into(connection, delayed_calls).values(this | {"number": 0, "at_us": now}).on_conflict_do_nothing()
    )
    is_this = and_(*(delayed_calls.c[name] == value for name, value in this.items()))
    noted = connection.execute(select(delayed_calls).where(is_this).with_for_update()).one()
    last = noted.number
    if noted.at_us < _forgotten_before(now):
        _keep_for_good(connection, keys["provider"], [keys["producer"]])
        last = 0
    if LastCall(last).has(call):
        return False
    if last > call.previous:  # later calls failed in the queues
        failed = [delayed_batches.c[name] == value for name, value in this.items()]
        connection.execute(delete(delayed_batches).where(*failed, _columns.number > call.previous, _columns.claim == 0))
    connection.execute(update(delayed_calls).where(is_this).values(number=call.number, at_us=now))
    return True


def _forgotten_before(now: int) -> int:
    return now - CALL_KEPT_S * 1_000_000


def _keep_for_good(connection: Connection, provider: str, producers: Sequence[str]) -> None:
    """Keep the batches of these producers: none of their later calls deletes them as those of a failed call."""
    theirs = and_(_columns.provider == provider, _columns.producer.in_(producers))
    connection.execute(update(delayed_batches).where(theirs).values(producer="", number=0))


def _due_in_s(connection: Connection, clock: Clock, provider: str, holder: str) -> float | None:
    now = clock(connection)
    times = list[int]()
    held = set[int]()
    for slot in connection.execute(select(releases).where(releases.c.provider == provider, releases.c.until_us > 0)):
        times.append(now if slot.holder == holder else slot.until_us)
        held.add(slot.queue)
    first = select(_columns.due_at_us).where(_unclaimed(provider, held)).order_by(_columns.due_at_us, _columns.id)
    due = connection.execute(first.limit(1)).scalar()
    times += [] if due is None else [due]
    return max(min(times) - now, 0) / 1e6 if times else None


def _unclaimed(provider: str, held: Collection[int]) -> ColumnElement[bool]:
    """Match rows without a release, of queues without a release."""
    free = and_(_columns.provider == provider, _columns.claim == 0)
    return and_(free, _columns.queue.not_in(sorted(held))) if held else free


def _claim(
    connection: Connection, clock: Clock, provider: str, holder: tuple[str, int], limits: tuple[int, int]
) -> list[DelayRelease]:
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
    """Return the ids of batches that are due, by queue."""
    query = select(_columns.id, _columns.queue, func.length(_columns.batch).label("size"))
    query = query.where(_unclaimed(provider, held), _columns.due_at_us <= now)
    rows = connection.execute(query.order_by(_columns.due_at_us, _columns.id).limit(limits[0])).all()
    by_queue: defaultdict[int, list[int]] = defaultdict(list)
    for row in _within(rows, limits[1]):
        by_queue[row.queue].append(row.id)
    return by_queue


def _within(rows: Iterable[Any], max_bytes: int) -> Iterable[Any]:
    """Yield the first rows that together have at most `max_bytes`, at least one row."""
    total = 0
    for row in rows:
        if total and total + row.size > max_bytes:
            return
        total += row.size
        yield row


def _free_slot(connection: Connection, provider: str, queue: int) -> Row[Any] | None:
    """Lock and return the queue's row in `releases`. Return None if another process made a release meanwhile."""
    new = {"provider": provider, "queue": queue, "producer": f"delays {uuid.uuid4().hex}"}
    new |= {"claim": 0, "holder": "", "until_us": 0}
    connection.execute(insert_into(connection, releases).values(new).on_conflict_do_nothing())
    slot = connection.execute(select(releases).where(_is_slot(provider, queue)).with_for_update()).one()
    return None if slot.until_us else slot


def _is_slot(provider: str, queue: int) -> ColumnElement[bool]:
    return and_(releases.c.provider == provider, releases.c.queue == queue)


def _take(connection: Connection, ids: Sequence[int], number: int) -> int:
    """Give the rows this claim number. Return how many of them still exist."""
    chunks = [ids[at : at + _ROWS_AT_ONCE] for at in range(0, len(ids), _ROWS_AT_ONCE)]
    take = update(delayed_batches).values(claim=number)
    return sum(connection.execute(take.where(_columns.id.in_(chunk), _columns.claim == 0)).rowcount for chunk in chunks)


def _hold(connection: Connection, slot: Row[Any], number: int, holder: tuple[str, int], now: int) -> DelayRelease:
    name, hold_us = holder
    values = {"claim": number, "holder": name, "until_us": now + hold_us}
    connection.execute(update(releases).where(_is_slot(slot.provider, slot.queue)).values(values))
    query = select(delayed_batches).where(_taken(slot.provider, slot.queue, number))
    rows = connection.execute(query.order_by(_columns.due_at_us, _columns.id)).all()
    rows = [row for row in rows if _is_whole(connection, row)]
    try:
        batches = [due_batch(row.stream, row.batch, row.events, row.priority) for row in rows]
    except InvalidArgument as error:
        damage = f"a delayed batch in the control store is damaged ({error}); restore it from a copy"
        return DelayRelease(slot.queue, slot.producer, number, [], damage)
    return DelayRelease(slot.queue, slot.producer, number, batches)


def _is_whole(connection: Connection, row: Row[Any]) -> bool:
    """Return whether the row matches its checksum. Exclude a damaged row, so that the others are released."""
    try:
        check_row("delayed_batches", row)
    except DataDirectoryError as damage:
        _log.error("control store: %s", damage)
        connection.execute(update(delayed_batches).where(_columns.id == row.id).values(claim=_DAMAGED))
        return False
    return True


def _taken(provider: str, queue: int, number: int) -> ColumnElement[bool]:
    return and_(
        _TAKEN,
        _columns.provider == provider,
        _columns.queue == queue,
        _columns.claim == number,
    )


def _released(connection: Connection, provider: str, numbers: Mapping[int, int]) -> None:
    for queue, number in sorted(numbers.items()):
        this = and_(_is_slot(provider, queue), releases.c.claim == number)
        connection.execute(update(releases).where(this).values(until_us=0))
        connection.execute(delete(delayed_batches).where(_taken(provider, queue, number)))


def _waiting(connection: Connection, clock: Clock, provider: str) -> dict[int, DelayedBacklog]:
    now = clock(connection)
    due = func.min(_columns.due_at_us).label("due")
    query = select(_columns.queue, func.count().label("batches"), func.sum(_columns.events).label("events"), due)
    whole = and_(_columns.provider == provider, _columns.claim != _DAMAGED)
    rows = connection.execute(query.where(whole).group_by(_columns.queue))
    return {row.queue: DelayedBacklog(row.batches, int(row.events), (row.due - now) / 1e6) for row in rows}


def _forget_calls(connection: Connection, clock: Clock, provider: str) -> None:
    old = and_(delayed_calls.c.provider == provider, delayed_calls.c.at_us < _forgotten_before(clock(connection)))
    producers = connection.execute(select(delayed_calls.c.producer).where(old).with_for_update()).scalars().all()
    for at in range(0, len(producers), _ROWS_AT_ONCE):
        some = producers[at : at + _ROWS_AT_ONCE]
        _keep_for_good(connection, provider, some)
        gone = and_(delayed_calls.c.provider == provider, delayed_calls.c.producer.in_(some))
        connection.execute(delete(delayed_calls).where(gone))
