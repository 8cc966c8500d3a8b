"""Delays for adapters that have none: a decorator stores delayed batches in the control store, and publishes each once
into its queue when it is due.

Each process that has the provider open does this. The first process that looks claims the batches that are due;
`headrace.store.delays` explains why none is lost or published twice. A process wakes up in time for the batches that it
knows. It looks every few seconds for batches of other processes, which may have ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import deque
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from ..adapters import Backlog, ProducerSequence, QueueAdapter, Receipt
from ..adapters.forwarding import ForwardingAdapter
from ..store.delays import RELEASE_BATCHES, RELEASE_BYTES, DelayedBacklog, DelayedCall, DelayRelease, DelayStore
from ..streams import clock
from ..streams.background import BackgroundTasks
from ..streams.backoff import Backoff
from ..streams.delays import STORE
from ..streams.errors import Closed, HeadraceError, InvalidArgument, NotSupported, StorageError
from ..streams.events import EventBatch, ScheduledBatch
from ..streams.identity import SequenceToken
from ..streams.producer_ledger import LastCall

log = logging.getLogger("headrace.silo")

POLL_S = 5.0
"""Interval of looking for batches that other processes stored, in seconds. If no other process has the store, there is
no such interval."""
HOLD_S = 5.0
"""How long a claim of batches lasts, in seconds. If it is too short, processes repeat work; nothing else happens."""
COUNTED_S = 1.0
"""How long a count of the delayed batches of all queues is used, in seconds: callers ask for one queue at a time."""
FORGET_S = 3600.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0

_T = TypeVar("_T")

Placed = tuple[int, EventBatch]
"""The index of a queue, and a batch for it."""

_Unstored = tuple[DelayedCall, asyncio.Future[Mapping[int, int]]]
"""A call that is not stored yet, and the future for its result."""


class DelayStatistics(NamedTuple):
    """Counts of this process."""

    delays_stored_events: int
    released_events: int
    failing: str
    """Why delayed events cannot be published now; "" if they can."""


class DelayingAdapter(ForwardingAdapter):
    """An adapter with delays, around one without.

    Call `start` when due batches may be published. `aclose` closes the inner adapter too; the caller closes the store.
    """

    def __init__(self, inner: QueueAdapter, store: DelayStore, provider: str) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, delay=True)
        self.store = store
        self._provider = provider
        self._holder = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._lines: dict[str, asyncio.Future[Any]] = {}
        """The last call under way of each idempotent producer."""
        self._storing = BackgroundTasks()
        self._releasing = BackgroundTasks()
        self._unstored: deque[_Unstored] = deque()
        """Calls that wait for the transaction under way: the next one takes them together."""
        self._adding: asyncio.Future[None] | None = None
        self._wake = asyncio.Event()
        self._wakes_at = 0.0
        """Loop time until which nothing is to be done, as far as this process knows."""
        self._closing = False
        self._stored = self._released = 0
        self._counts: Mapping[int, Mapping[str, int]] = {}
        """By queue, the fields of its backlog that count delayed batches."""
        self._counted_until = 0.0
        self._failures: dict[int | None, tuple[str, float]] = {}
        """By queue, why nothing can be published into it, and when that was found. The key None: into no queue."""

    def start(self) -> None:
        """Publish the batches that are due, from now on."""
        self._releasing.start(self._run(), f"headrace delays {self._provider}")

    async def aclose(self) -> None:
        """Finish the calls that store batches. Wait for publishing in progress as long as its claim lasts."""
        self._closing = True
        self._wake.set()
        await self._storing.join()
        await self._releasing.join(HOLD_S)
        await self._releasing.aclose()
        await self.inner.aclose()

    def delay_statistics(self) -> DelayStatistics:
        return DelayStatistics(self._stored, self._released, self._failing())

    async def backlog(self, queue: int, offset: int) -> Backlog:
        """See QueueAdapter. Late batches count as not due yet, because they are not in the queue."""
        lag = await self.inner.backlog(queue, offset)
        if self._counted_until <= self._loop.time():
            self._counts = {
                each: _later(stored) for each, stored in (await self.store.backlogs(self._provider)).items()
            }
            self._counted_until = self._loop.time() + COUNTED_S
        return lag._replace(**self._counts.get(queue, {}))

    # ---- publishing ------------------------------------------------------------------------------------------------

    def enqueue(
        self, batches: Sequence[Placed], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        """See QueueAdapter, with three differences.

        A call that fails may have stored a part, the delayed or the other batches. If it is sent again with its
        `sequence`, the rest is stored. The token of a delayed batch is lower than its later token in the queue. A call
        with delayed batches also raises SequenceConflict while the producer's call before it is still on its way to the
        queue because its caller was cancelled.
        """
        if self._closing:
            raise Closed(f"provider {self._provider!r} is closed")
        parts = _Parts.of(batches)
        if sequence is None:
            return self._enqueue(parts) if parts.delayed else self.inner.enqueue(batches)
        before = self._lines.get(sequence.producer)
        if before is None and not parts.delayed:
            answer: asyncio.Future[Sequence[Receipt]] = asyncio.ensure_future(
                self.inner.enqueue(batches, sequence=sequence)
            )
        else:
            answer = self._begun(self._enqueue_after(before, parts, sequence))
        self._line_up(sequence.producer, answer)
        return asyncio.shield(answer) if parts.delayed or before is not None else answer

    def _line_up(self, producer: str, answer: asyncio.Future[Any]) -> None:
        self._lines[producer] = answer

        def leave(_: object) -> None:
            if self._lines.get(producer) is answer:
                del self._lines[producer]

        answer.add_done_callback(leave)

    def _begun(self, storing: Coroutine[Any, Any, _T]) -> asyncio.Future[_T]:
        """Run `storing` to its end, also if the caller is cancelled."""
        return self._storing.hold(storing, f"headrace delay {self._provider}")

    def _enqueue(self, parts: _Parts) -> Awaitable[Sequence[Receipt]]:
        """Store a call without a sequence. Immediate batches go to the adapter at once, so that later
        calls cannot overtake them."""
        storing = asyncio.ensure_future(self.inner.enqueue(parts.immediate)) if parts.immediate else None

        async def both() -> Sequence[Receipt]:
            adding = asyncio.ensure_future(self._add(parts.delayed, None))
            if storing is None:
                return parts.receipts(await adding, [])
            for error in await asyncio.gather(adding, storing, return_exceptions=True):
                if isinstance(error, BaseException):
                    raise error
            return parts.receipts(adding.result(), storing.result())

        return asyncio.shield(self._begun(both()))

    async def _enqueue_after(
        self, before: asyncio.Future[Any] | None, parts: _Parts, sequence: ProducerSequence
    ) -> Sequence[Receipt]:
        """Store a call with a sequence, after the producer's call `before`.

        The number of the producer in the queues proves that the whole call is stored. So the delayed batches are stored
        first. If the call ends there, and is repeated, the delay store recognises it by its number. Raises
        SequenceConflict if a call before it is missing: that one may still be on its way to the queue, without its
        caller.
        """
        if before is not None:
            await asyncio.wait([before])
        added: Sequence[Receipt] = []
        if parts.delayed:
            last = LastCall(await self.inner.last_sequence(sequence.producer))
            if last.accepts(sequence):
                added = await self._add(parts.delayed, sequence)
            else:
                last.answer(sequence, 0)
        receipts = await self.inner.enqueue(parts.immediate, sequence=sequence)
        duplicate = any(receipt.duplicate for receipt in receipts) or not added
        return parts.receipts([Receipt(None, duplicate=True)] * len(parts.delayed) if duplicate else added, receipts)

    async def _add(
        self, delayed: Sequence[tuple[int, ScheduledBatch]], sequence: ProducerSequence | None
    ) -> Sequence[Receipt]:
        ends = await self._add_with_others(DelayedCall(delayed, sequence))
        self._stored += sum(batch.count for _, batch in delayed)
        self._counted_until = 0.0
        if self._loop.time() + min(batch.delay_us for _, batch in delayed) / 1e6 < self._wakes_at:
            self._wake.set()
        return [Receipt(SequenceToken(ends[queue])) for queue, _ in delayed]

    async def _add_with_others(self, call: DelayedCall) -> Mapping[int, int]:
        """Store a call, together with others that wait. Return the ends of its queues before it was stored."""
        answer: asyncio.Future[Mapping[int, int]] = self._loop.create_future()
        self._unstored.append((call, answer))
        if self._adding is None:
            self._adding = self._begun(self._add_all())
        return await answer

    async def _add_all(self) -> None:
        try:
            while self._unstored:
                await self._add_some(_some(self._unstored))
        finally:
            self._adding = None

    async def _add_some(self, some: Sequence[_Unstored]) -> None:
        calls = [call for call, _ in some]
        queues = {queue for call in calls for queue, _ in call.batches}
        try:
            ends = {queue: (await self.inner.bounds(queue)).next for queue in queues}
            await self.store.add_all(self._provider, calls)
        except Exception as error:  # noqa: BLE001 (each caller gets it)
            for _, answer in some:
                if not answer.done():
                    answer.set_exception(error)
            return
        for _, answer in some:
            if not answer.done():
                answer.set_result(ends)

    # ---- due batches -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff, forget_at = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S), 0.0
        while not self._closing:
            self._wake.clear()
            self._wakes_at = float("inf")  # until `look` has returned, each new delayed batch wakes this loop
            try:
                if self._loop.time() >= forget_at:
                    forget_at = self._loop.time() + FORGET_S
                    await self.store.forget_calls(self._provider)
                wait_s = await self.look()
                backoff.reset()
                self._failures.pop(None, None)
            except HeadraceError as error:
                self._note_failure(None, str(error))
                wait_s = backoff.next_s()
            except Exception as error:
                log.exception("provider %r: what is due cannot be published yet", self._provider)
                self._failures[None] = str(error), self._loop.time()
                wait_s = backoff.next_s()
            await self._wait(wait_s)

    def _note_failure(self, queue: int | None, why: str) -> None:
        level = logging.DEBUG if queue in self._failures else logging.WARNING
        of = "" if queue is None else f" in queue {queue}"
        log.log(level, "provider %r: what is due%s cannot be published yet: %s", self._provider, of, why)
        self._failures[queue] = why, self._loop.time()

    def _failing(self) -> str:
        """The reason of a recent failure. An old one does not count: another process may have published since."""
        heard_since = self._loop.time() - 3 * HOLD_S
        return next((why for why, at in self._failures.values() if at >= heard_since), "")

    async def _wait(self, wait_s: float) -> None:
        self._wakes_at = self._loop.time() + wait_s
        try:
            async with asyncio.timeout(None if math.isinf(wait_s) else wait_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def look(self) -> float:
        """Publish the batches that are due. Return the time until the next look, in seconds; infinity: a new delayed
        batch wakes this loop."""
        due_in_s = await self.store.due_in_s(self._provider, self._holder)
        if due_in_s is None or due_in_s > 0:
            return min(math.inf if due_in_s is None else due_in_s, math.inf if self.store.private else POLL_S)
        releases = await self.store.claim(self._provider, self._holder, HOLD_S)
        if not releases:
            return FIRST_PAUSE_S  # another process was faster, and publishes it
        await self._publish_all(releases)
        return 0.0

    async def _publish_all(self, releases: Sequence[DelayRelease]) -> None:
        """Publish releases independently. Any process can take a failed one after its claim has ended."""
        outcomes = await asyncio.gather(*map(self._publish, releases), return_exceptions=True)
        done = [release for release, error in zip(releases, outcomes, strict=True) if error is None]
        if done:
            await self.store.released(self._provider, {release.queue: release.number for release in done})
        self._released += sum(batch.count for release in done for batch in release.batches)
        self._counted_until = 0.0
        for release, error in zip(releases, outcomes, strict=True):
            if error is None:
                self._failures.pop(release.queue, None)
            elif isinstance(error, HeadraceError):
                self._note_failure(release.queue, str(error))
                self._holder = uuid.uuid4().hex
            else:
                raise error

    async def _publish(self, release: DelayRelease) -> None:
        if release.damage:
            raise StorageError(release.damage)
        last = LastCall(await self.inner.last_sequence(release.producer))
        # After `last`, not after `number - 1`: the queue may have forgotten that number, but never `last`.
        if release.batches and release.number > last.number:
            sequence = ProducerSequence(release.producer, release.number, last.number)
            await self.inner.enqueue([(release.queue, batch) for batch in release.batches], sequence=sequence)


def _later(stored: DelayedBacklog) -> Mapping[str, int]:
    """Return the fields of a `Backlog` that count delayed batches."""
    due_at_us = clock.now_us() + round(stored.due_in_s * 1e6)
    return {"later": stored.batches, "later_events": stored.events, "later_us": due_at_us}


class _Parts(NamedTuple):
    """The batches of a call, divided into delayed and immediate ones."""

    delayed: Sequence[tuple[int, ScheduledBatch]]
    immediate: Sequence[Placed]
    order: Sequence[bool]
    """Of each batch, whether it is delayed."""

    @classmethod
    def of(cls, batches: Sequence[Placed]) -> _Parts:
        order = [is_delayed(batch) for _, batch in batches]
        delayed = [(queue, batch) for queue, batch in batches if isinstance(batch, ScheduledBatch) and batch.delay_us]
        immediate = [placed for placed, later in zip(batches, order, strict=True) if not later]
        return cls(delayed, immediate, order)

    def receipts(self, added: Sequence[Receipt], stored: Sequence[Receipt]) -> Sequence[Receipt]:
        """Return the receipts in the order of the call."""
        later, now = iter(added), iter(stored)
        return [next(later if delayed else now) for delayed in self.order]


def _some(waiting: deque[_Unstored]) -> Sequence[_Unstored]:
    """Take out the first calls: at least one, and so few that a transaction stays short."""
    some: list[_Unstored] = []
    batches = nbytes = 0
    while waiting and batches < RELEASE_BATCHES and nbytes < RELEASE_BYTES:
        some.append(waiting.popleft())
        batches += len(some[-1][0].batches)
        nbytes += sum(len(batch.encoded) for _, batch in some[-1][0].batches)
    return some


def is_delayed(batch: EventBatch) -> bool:
    return isinstance(batch, ScheduledBatch) and batch.delay_us > 0


def check_delays_possible(provider: str, name: str, adapter: QueueAdapter, *, private: bool) -> None:
    """Raise InvalidArgument or NotSupported if delays are impossible or not needed with the adapter.

    `private`: the delayed events are stored in the memory of this process.
    """
    can = adapter.capabilities
    if can.delay:
        raise InvalidArgument(f"provider {provider!r}: the adapter {name!r} delays by itself: leave out delays")
    if not can.idempotent:
        raise NotSupported(
            f"provider {provider!r}: delays need an adapter with idempotent producers, to publish each event once, and "
            f"{name!r} has none: leave out delays, or choose another adapter"
        )
    if not (can.durable or private):
        raise NotSupported(
            f"provider {provider!r}: the queues of the adapter {name!r} are one process's own, and events in a data "
            f'directory outlast it: leave out delays, or take "{STORE}" without a data directory'
        )
