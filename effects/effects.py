"""Handlers whose effects are applied exactly once. See docs/effects.md."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..streams.arguments import check_integer, refused
from ..streams.errors import InvalidArgument, Unavailable
from ..streams.events import Event, EventBatch, PartialBatch
from ..streams.identity import StreamId
from ..streams.transactions import EffectCounts, EffectScope, RedriveRefused
from .database import EffectDatabase, EffectTransaction, database_of
from .driver_state import begin_writing, refuse_autocommit
from .failed_events import RedriveDecision, token_of
from .outages import is_conflict, is_outage, outages, unavailable
from .positions import AppliedPosition, EncodedState, LaterGenerationError, StreamPosition
from .schema import check_dialect, check_encodings, check_rights, require
from .state import StreamState
from .transaction import HandlerState, Transaction

CONFLICT_ATTEMPTS = 5
"""How many times a transaction that collides with others is tried, without a pause."""
CACHED_STATES = 10_000
CACHED_BYTES = 1 << 22
"""Bounds of the states that are kept in memory, for each subscription and queue."""
_checked: WeakSet[Engine] = WeakSet()


class TransactionSlots:
    """Bounds how many transactions run at a time."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = asyncio.Semaphore(slots)
        self._holders: list[asyncio.Task[object] | None] = []

    def one(self) -> _Slot:
        """Return a context that waits for a slot, and holds it. Entering raises InvalidArgument if the task holds all
        slots."""
        return _Slot(self._free, self._holders, self._slots)


class _Slot:
    """One use of a slot."""

    def __init__(self, free: asyncio.Semaphore, holders: list[asyncio.Task[object] | None], slots: int) -> None:
        self._free = free
        self._holders = holders
        self._slots = slots
        self._task: asyncio.Task[object] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        if self._holders.count(self._task) == self._slots:
            raise InvalidArgument(
                "this task is in an `async with batch.effects(...)` block on the same connection or engine, and would "
                "wait for itself: leave that `async with` first"
            )
        await self._free.acquire()
        self._holders.append(self._task)

    async def __aexit__(self, *_: object) -> None:
        self._holders.remove(self._task)
        self._free.release()


SlotsByLoop = WeakKeyDictionary[asyncio.AbstractEventLoop, TransactionSlots]
_shared_slots: WeakKeyDictionary[AsyncEngine | AsyncConnection, SlotsByLoop] = WeakKeyDictionary()

_UNKNOWN_EVENT = (
    "it is not known whether the effects of this event are applied, because it failed before the subscription had "
    "effects, or their database was restored"
)
_UNKNOWN_EVENT_HINT = (
    "to apply it, run 'headrace effects unknown URL --apply' and redrive it again; to discard it, run 'headrace "
    "deadletters delete'"
)


class Effects:
    """A database in which handlers have effects.

    `engine` is an Engine or an AsyncEngine of SQLAlchemy, for PostgreSQL or SQLite. It may be an AsyncConnection that
    is in no transaction, too: then one transaction runs at a time, on this connection.

    `state`: keep a state for each stream. `max_transactions`: how many transactions run at a time; None: as many as the
    engine's pool has connections, and one for SQLite.

    Raises InvalidArgument for wrong arguments, and for an AsyncConnection with more than one transaction;
    NotSupported for another database.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine | AsyncConnection,
        *,
        state: StreamState | None = None,
        max_transactions: int | None = None,
    ) -> None:
        self.database = database_of(engine)
        check_dialect(self.database.engine.dialect.name)
        if state is not None and not isinstance(state, StreamState):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise refused("state", state, "a StreamState, or None")
        if max_transactions is not None:
            check_integer("max_transactions", max_transactions, 1)
        self.state = state
        self._max_transactions = max_transactions or self.database.transactions
        self._slots: SlotsByLoop = WeakKeyDictionary()
        self._has_one_connection = isinstance(engine, AsyncConnection)
        if isinstance(engine, AsyncConnection):
            if self._max_transactions > 1:
                raise refused(
                    "max_transactions", max_transactions, "1 or None, because a connection has one transaction"
                )
            self._slots = _shared_slots.setdefault(engine, self._slots)

    @classmethod
    def sharing(cls, engine: AsyncEngine | AsyncConnection) -> Effects:
        """Return effects that share the bound of transactions with all others that this returns for the engine."""
        made = cls(engine)
        made._slots = _shared_slots.setdefault(engine, made._slots)
        return made

    async def check_once(self) -> None:
        """Run `check`, unless a check of this engine has succeeded in this process. It waits for a free transaction, as
        events do."""
        engine = self.database.engine
        if engine not in _checked:
            async with self._slots_of_loop().one():
                await self._check()
            _checked.add(engine)

    async def check(self) -> None:
        """Raise NotFound if the database has no tables for effects, InvalidArgument if the engine commits each
        statement, Unavailable if the database cannot be reached. With an AsyncConnection, wait until it is free."""
        async with self._slots_of_loop().one() if self._has_one_connection else nullcontext():
            await self._check()

    async def _check(self) -> None:
        async with self.database.transaction() as transaction:
            with outages:
                await transaction.call(_check_database)

    def scoped(
        self,
        handler: Callable[[Any, Transaction], Awaitable[None]] | None,
        scope: EffectScope,
        counts: EffectCounts,
        *,
        batch: bool,
    ) -> EffectsInScope:
        """Return the effects of one subscription in one queue. Call it on the event loop. Without a handler, only
        `transaction` applies events."""
        slots = self._slots_of_loop()
        return EffectsInScope(self.database, self.state, handler, scope, counts=counts, slots=slots, batch=batch)

    def _slots_of_loop(self) -> TransactionSlots:
        return self._slots.setdefault(asyncio.get_running_loop(), TransactionSlots(self._max_transactions))


def _check_database(connection: Connection) -> None:
    refuse_autocommit(connection)
    check_encodings(connection)
    require(connection)
    check_rights(connection)


class _StaleStateError(Exception):
    """The row of the stream was changed after it was read."""

    def __str__(self) -> str:
        return "another transaction changed the row of the stream"


def _has_collided(error: BaseException) -> bool:
    return isinstance(error, _StaleStateError) or is_conflict(error)


def _check_current(*, is_current: bool) -> None:
    if not is_current:
        raise _StaleStateError


class EffectsInScope:
    """Applies the effects of the events of one scope: one subscription in one queue, until the next seek."""

    def __init__(
        self,
        database: EffectDatabase,
        state_options: StreamState | None,
        handler: Callable[[Any, Transaction], Awaitable[None]] | None,
        scope: EffectScope,
        *,
        counts: EffectCounts,
        slots: TransactionSlots,
        batch: bool,
    ) -> None:
        self._database = database
        self._state_options = state_options
        self._handler = handler
        self._scope = scope
        self._counts = counts
        self._slots = slots
        self._batch = batch
        self._known = KnownPositions()

    async def call(self, delivered: Event | EventBatch, /) -> None:
        """Call the handler in a transaction, with the events whose effects are not committed yet."""
        events = [delivered] if isinstance(delivered, Event) else delivered.events()
        if self._scope.queues is not None:  # without a StreamPosition for each event
            self._position(events[0]).check_queue()
        if not await self._in_turn(events[0], lambda: self._apply(delivered, events)):
            self._counts.already_applied += len(events)

    async def redrive(self, event: Event) -> None:
        """Apply an event that failed, unless its effects are applied. Raises RedriveRefused if it is not known
        whether they are."""
        try:
            if not await self._in_turn(event, lambda: self._redrive(event)):
                raise _out_of_date(_stream_of(event))
        except RedriveRefused:
            await self.note_unknown(event)
            raise

    async def note_unknown(self, event: Event) -> None:
        """Note that a redrive was refused. Raises Unavailable."""
        await self._on_failures(event, lambda position, connection: position.note_unknown(connection, event))

    async def failed(self, events: Sequence[Event]) -> None:
        """Note that these events of one stream may become dead letters. Raises Unavailable."""
        if events:
            await self._on_failures(events[0], lambda position, connection: position.note_failed(connection, events))

    async def check_position(self, events: Sequence[Event]) -> None:
        """Raise Unavailable if the position of these events of one stream cannot be written."""
        if events:
            await self._on_failures(events[0], StreamPosition.lock)

    async def given_up(self, events: Sequence[Event]) -> None:
        """Move the position past these events of one stream. Raises Unavailable."""
        if events:
            await self._on_failures(events[0], lambda position, connection: position.give_up(connection, events))

    async def _on_failures(self, event: Event, work: Callable[[StreamPosition, Connection], object]) -> None:
        """Execute the statements of `work` on the position that has the failed events."""

        async def run() -> None:
            position = self._position(event)
            async with self._database.transaction() as transaction:
                await transaction.call(lambda connection: work(position.of_failures(connection), connection))
            self._known.drop(_stream_of(event))

        try:
            await self._in_turn(event, run)
        except Unavailable:
            raise
        except Exception as error:  # whatever it is, the events are not to blame: they failed before
            raise unavailable(error) from error

    def _position(self, event: Event) -> StreamPosition:
        stream, lost = _stream_of(event), self._scope.lost
        generation = None if lost is None else lost.get(stream)
        scope = self._scope if generation is None else self._scope._replace(generation=generation)
        return StreamPosition(scope, stream)

    async def _is_lost(self, stream: StreamId, later: LaterGenerationError) -> bool:
        """Whether the control store has lost the generation of the stream's position. Otherwise the scope is out of
        date. Raises Unavailable."""
        return self._scope.lost is not None and await self._scope.lost.is_lost(stream, later.generation)

    async def _in_turn(self, event: Event, work: Callable[[], Awaitable[None]]) -> bool:
        """Run the work of one transaction when a slot is free. Repeat it if it collides with another transaction.
        Return False, without any work, if the scope is out of date."""
        stream = _stream_of(event)
        async with self._slots.one():
            for attempt in range(1, CONFLICT_ATTEMPTS + 1):
                try:
                    await work()
                    break
                except LaterGenerationError as later:
                    self._known.drop(stream)
                    if not await self._is_lost(stream, later):
                        return False
                except BaseException as error:
                    self._known.drop(stream)
                    if is_outage(error):
                        raise unavailable(error) from error
                    if not _has_collided(error):
                        raise
                    if attempt == CONFLICT_ATTEMPTS:
                        raise _collided(stream) from error
            else:
                raise _collided(stream)
        return True

    @asynccontextmanager
    async def transaction(self, events: Sequence[Event], *, redriven: bool) -> AsyncGenerator[Transaction]:
        """Open the transaction of these events of one stream for the length of an `async with`. It cannot be repeated:
        if it collides with another one, this raises Unavailable."""
        async with self._slots.one():
            try:
                async with self._opened_in_generation(events, redriven=redriven) as opened:
                    yield opened
            except BaseException as error:
                self._known.drop(_stream_of(events[0]))
                if is_outage(error):
                    raise unavailable(error) from error
                if _has_collided(error):
                    raise Unavailable(
                        f"the transaction of stream {_stream_of(events[0])} collided with another one: the events are "
                        "delivered again"
                    ) from error
                raise

    @asynccontextmanager
    async def without_events(self) -> AsyncGenerator[Transaction]:
        """Open a transaction that applies no event."""
        async with self._slots.one(), self._database.transaction() as transaction:
            state = None if self._state_options is None else HandlerState(self._state_options, None)
            yield Transaction(transaction, self._scope, state, ())

    # ---- one transaction -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _reading_transaction(self) -> AsyncGenerator[EffectTransaction]:
        """Open a transaction that reads first. In SQLite, begin it with BEGIN IMMEDIATE."""
        async with self._database.transaction() as transaction:
            if self._database.engine.dialect.name == "sqlite":
                await transaction.call(begin_writing)
            yield transaction

    @asynccontextmanager
    async def _opened_in_generation(self, events: Sequence[Event], *, redriven: bool) -> AsyncGenerator[Transaction]:
        """As `_opened`. If the scope is out of date, the transaction applies no event."""
        stream = _stream_of(events[0])
        async with AsyncExitStack() as stack:
            try:
                opened = await stack.enter_async_context(self._opened(events, redriven=redriven))
            except LaterGenerationError as later:
                is_lost = await self._is_lost(stream, later)
                if redriven and not is_lost:
                    raise _out_of_date(stream) from later
                again = self._opened(events, redriven=redriven) if is_lost else self._applying_nothing(events)
                try:
                    opened = await stack.enter_async_context(again)
                except LaterGenerationError as error:
                    raise _collided(stream) from error
            yield opened

    @asynccontextmanager
    async def _applying_nothing(self, events: Sequence[Event]) -> AsyncGenerator[Transaction]:
        """Open a transaction that applies none of these events, and reads the state of their stream."""
        async with self._reading_transaction() as transaction:
            state, options = None, self._state_options
            if options is not None:
                state = HandlerState(options, await transaction.call(self._position(events[0]).find))
            self._counts.already_applied += len(events)
            yield Transaction(transaction, self._scope, state, ())

    async def _apply(self, delivered: Event | EventBatch, events: Sequence[Event]) -> None:
        if self._state_options is None:
            # Not `_applying`: that is one generator more for each event.
            async with self._database.transaction() as transaction:
                await self._handle(delivered, await self._claim(transaction, events))
            return
        known = self._known.get(_stream_of(events[0]))
        if known is not None and not self._position(events[0]).after(known, events):
            self._counts.already_applied += len(events)
            return
        async with self._applying_with_state(events, self._state_options) as opened:
            await self._handle(delivered, opened)

    async def _handle(self, delivered: Event | EventBatch, transaction: Transaction) -> None:
        """Call the handler, if the transaction applies events."""
        assert self._handler is not None
        if transaction.events:
            before = _cancellations()
            await self._handler(_unapplied_part(delivered, transaction.events), transaction)
            if _cancellations() > before:
                raise InvalidArgument(
                    "the handler was cancelled, and has caught the CancelledError: let it pass, else a part of the "
                    "event's effects would be committed"
                )

    def _opened(self, events: Sequence[Event], *, redriven: bool) -> AbstractAsyncContextManager[Transaction]:
        if redriven:
            return self._redriving(events[0])
        return (
            self._applying(events)
            if self._state_options is None
            else self._applying_with_state(events, self._state_options)
        )

    @asynccontextmanager
    async def _applying(self, events: Sequence[Event]) -> AsyncGenerator[Transaction]:
        async with self._database.transaction() as transaction:
            yield await self._claim(transaction, events)

    async def _claim(self, transaction: EffectTransaction, events: Sequence[Event]) -> Transaction:
        unapplied = await transaction.call(self._position(events[0]).claim, events)
        self._counts.already_applied += len(events) - len(unapplied)
        return Transaction(transaction, self._scope, None, unapplied)

    @asynccontextmanager
    async def _applying_with_state(self, events: Sequence[Event], options: StreamState) -> AsyncGenerator[Transaction]:
        """Write position and state by one statement at the end. Optimistic: if another owner writes the row first, this
        raises _StaleStateError, and the handler runs again."""
        position, stream = self._position(events[0]), _stream_of(events[0])
        row, next_row = self._known.get(stream), None
        try:
            async with self._reading_transaction() as transaction:
                row = row or await transaction.call(position.find)
                unapplied = position.after(row, events)
                if row is not None and row.unapplied:
                    unapplied = await transaction.call(position.uncommitted_events, row, events)
                state = HandlerState(options, row)
                yield Transaction(transaction, self._scope, state, unapplied)
                if unapplied:
                    await transaction.flush()
                    encoded, revision = state.encoded(), row.revision if row is not None else 0
                    stored = await transaction.call(position.store, unapplied, encoded, revision)
                    _check_current(is_current=stored)
                    if row is None or not row.unapplied:
                        next_row = _row_after(position.scope, row, unapplied, encoded)
        except Exception as error:
            if not isinstance(error, _StaleStateError) and await self._has_changed(position, row):
                raise _StaleStateError from error  # perhaps only because another owner has applied the event
            raise
        self._counts.already_applied += len(events) - len(unapplied)
        if next_row is not None:
            self._known.put(stream, next_row)
        else:
            self._known.drop(stream)

    async def _has_changed(self, position: StreamPosition, known: AppliedPosition | None) -> bool:
        async with self._database.transaction() as transaction:
            now = await transaction.call(position.find)
        return now is not None and (known is None or now.revision != known.revision)

    async def _redrive(self, event: Event) -> None:
        async with self._redriving(event) as opened:
            await self._handle(_in_batch(event) if self._batch else event, opened)

    @asynccontextmanager
    async def _redriving(self, event: Event) -> AsyncGenerator[Transaction]:
        position = self._position(event)
        async with self._database.transaction() as transaction:
            await transaction.call(position.check_generation)
            decision = await transaction.call(lambda c: position.of_failures(c).claim_redrive(c, event))
            if decision is RedriveDecision.REFUSE:
                raise RedriveRefused(_UNKNOWN_EVENT, hint=_UNKNOWN_EVENT_HINT)
            self._counts.already_applied += decision is RedriveDecision.DONE
            known = await transaction.call(position.lock) if self._state_options is not None else None
            state = None if self._state_options is None else HandlerState(self._state_options, known)
            unapplied = [event] if decision is RedriveDecision.APPLY else []
            yield Transaction(transaction, self._scope, state, unapplied)
            if unapplied and state is not None and known is not None:
                await transaction.flush()
                changed = await transaction.call(position.change_state, state.encoded(), known.revision)
                _check_current(is_current=changed)
        self._known.drop(_stream_of(event))  # a redrive changes the row


class KnownPositions:
    """The rows of streams as this process wrote them last. Bounded; a row that is missing is read again."""

    def __init__(self) -> None:
        self._rows: OrderedDict[StreamId, AppliedPosition] = OrderedDict()
        self._bytes = 0

    def get(self, stream: StreamId) -> AppliedPosition | None:
        return self._rows.get(stream)

    def put(self, stream: StreamId, row: AppliedPosition) -> None:
        """The row is committed."""
        self.drop(stream)
        self._rows[stream] = row
        self._bytes += len(row.state or b"")
        while len(self._rows) > CACHED_STATES or self._bytes > CACHED_BYTES:
            self.drop(next(iter(self._rows)))

    def drop(self, stream: StreamId) -> None:
        """Forget the row, so that the next call reads it."""
        row = self._rows.pop(stream, None)
        if row is not None:
            self._bytes -= len(row.state or b"")


def _out_of_date(stream: StreamId) -> Unavailable:
    return Unavailable(f"a seek moved the subscription: the dead letter of stream {stream} is redriven again later")


def _collided(stream: StreamId) -> Unavailable:
    return Unavailable(
        f"the transaction of stream {stream} collided with another one in {CONFLICT_ATTEMPTS} attempts: it is tried "
        "again later"
    )


def _unapplied_part(delivered: Event | EventBatch, unapplied: Sequence[Event]) -> Event | EventBatch:
    """Return the part of a batch that is not applied."""
    if isinstance(delivered, Event) or len(unapplied) == delivered.count:
        return delivered
    return PartialBatch(delivered, list(unapplied))


def _row_after(
    scope: EffectScope, row: AppliedPosition | None, events: Sequence[Event], state: EncodedState
) -> AppliedPosition:
    """Return the row that replaces `row` when the effects of these events are committed."""
    revision = (row.revision if row is not None else 0) + 1
    return AppliedPosition(scope.generation, scope.queue, token_of(events[-1]), revision, 0, *state)


def _in_batch(event: Event) -> PartialBatch:
    """Return a batch of this event, as a handler of batches gets it."""
    batch = EventBatch.of(_stream_of(event), [event])
    batch.offset = token_of(event).offset
    return PartialBatch(batch, [event])


def _stream_of(event: Event) -> StreamId:
    assert event.stream is not None
    return event.stream


def _cancellations() -> int:
    """Return how many cancellations of this task were requested, and not taken back."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
