"""Delays for queues that have none: a provider parks delayed batches in its control store or in a Redis, and publishes
them into their queues when they are due, each once.

Any process that has the provider open does it: whoever looks first claims what is due (`headrace.streams.parking` says
why nothing is lost or doubled). It is awake for what it parked itself and what it saw parked; for what another process
parked and did not live to publish, it looks every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from ..adapters import ProducerSequence, QueueAdapter, Receipt
from ..streams.errors import Closed, HeadraceError, InvalidArgument, NotFound, NotSupported, StorageError
from ..streams.events import EventBatch, ScheduledBatch
from ..streams.identity import SequenceToken
from ..streams.parking import RELEASE_BATCHES, RELEASE_BYTES, ParkingCall, ParkingLot, Release
from ..streams.store import ControlStore

if TYPE_CHECKING:
    from ..adapters.redis.parking import RedisParking

log = logging.getLogger("headrace.silo")

STORE = "store"
"""The value of a provider's option `delays`: its control store. Any other is the URL of a Redis."""
LOOK_S = 5.0
"""How often to look for what other processes parked, in seconds."""
HOLD_S = 5.0
"""How long what was claimed is left to who claimed it, in seconds. Too short a time costs work, nothing else."""
FORGET_S = 3600.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0

_T = TypeVar("_T")

Placed = tuple[int, EventBatch]
"""The index of a queue, and a batch for it."""

_Unparked = tuple[ParkingCall, asyncio.Future[Mapping[int, int]]]
"""A call that is to be parked, and who waits for it."""


class ParkingStatistics(NamedTuple):
    """What this process did."""

    parked_events: int
    released_events: int
    failing: str
    """Why nothing can be published now, "" where it can."""


class Parking:
    """A provider's delays in this process. `start` before use, `aclose` after; the lot is closed by who opened it."""

    def __init__(self, provider: str, adapter: QueueAdapter, lot: ParkingLot) -> None:
        self.lot = lot
        self._provider = provider
        self._adapter = adapter
        self._holder = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._lines: dict[str, asyncio.Future[Any]] = {}
        """The last call under way of each idempotent producer."""
        self._storing: set[asyncio.Future[Any]] = set()
        self._unparked: deque[_Unparked] = deque()
        """Calls that wait for the transaction under way: the next one takes them together."""
        self._parking: asyncio.Future[None] | None = None
        self._wake = asyncio.Event()
        self._wakes_at = 0.0
        """Until when nothing is to be done, as far as is known; by the loop's clock."""
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._parked = self._released = 0
        self._failures: dict[int | None, tuple[str, float]] = {}
        """Why nothing can be published into a queue, and when that was found; under None, why into none."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"headrace delays {self._provider}")

    async def aclose(self, drain_s: float) -> None:
        """Finish what is being stored, and what is being published within `drain_s` seconds: the rest others do."""
        self._closing = True
        self._wake.set()
        await asyncio.gather(*self._storing, return_exceptions=True)
        if self._task is not None:
            await asyncio.wait([self._task], timeout=drain_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def statistics(self) -> ParkingStatistics:
        return ParkingStatistics(self._parked, self._released, self._failing())

    # ---- publishing ------------------------------------------------------------------------------------------------

    def enqueue(
        self, batches: Sequence[Placed], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        """As the seam says, except: a call that fails may have stored a part, what is delayed or what is not. Sent
        again with its `sequence`, the rest is stored. The token of what is delayed is below the one that it gets."""
        if self._closing:
            raise Closed(f"provider {self._provider!r} is closed")
        parts = _Parts.of(batches)
        if sequence is None:
            return self._enqueue(parts) if parts.delayed else self._adapter.enqueue(batches)
        before = self._lines.get(sequence.producer)
        if before is None and not parts.delayed:
            answer: asyncio.Future[Sequence[Receipt]] = asyncio.ensure_future(
                self._adapter.enqueue(batches, sequence=sequence)
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
        """What has begun is not left half done, whoever waits for it."""
        task = asyncio.create_task(storing, name=f"headrace park {self._provider}")
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)
        task.add_done_callback(_look_at)
        return task

    def _enqueue(self, parts: _Parts) -> Awaitable[Sequence[Receipt]]:
        """Without a sequence. What is not delayed is handed on at once, to stay before what is published later."""
        storing = asyncio.ensure_future(self._adapter.enqueue(parts.immediate)) if parts.immediate else None

        async def both() -> Sequence[Receipt]:
            parking = asyncio.ensure_future(self._park(parts.delayed, None))
            if storing is None:
                return parts.receipts(await parking, [])
            for error in await asyncio.gather(parking, storing, return_exceptions=True):
                if isinstance(error, BaseException):
                    raise error
            return parts.receipts(parking.result(), storing.result())

        return asyncio.shield(self._begun(both()))

    async def _enqueue_after(
        self, before: asyncio.Future[Any] | None, parts: _Parts, sequence: ProducerSequence
    ) -> Sequence[Receipt]:
        """What the queues remember of the producer is the proof that a call is stored, also of what is delayed of it:
        so it is parked first. A call that was parked and got no further is known to the store by its number."""
        if before is not None:
            await asyncio.wait([before])
        parked: Sequence[Receipt] = []
        if parts.delayed and await self._adapter.last_sequence(sequence.producer) == sequence.previous:
            parked = await self._park(parts.delayed, sequence)
        receipts = await self._adapter.enqueue(parts.immediate, sequence=sequence)
        duplicate = any(receipt.duplicate for receipt in receipts) or not parked
        return parts.receipts([Receipt(None, duplicate=True)] * len(parts.delayed) if duplicate else parked, receipts)

    async def _park(
        self, delayed: Sequence[tuple[int, ScheduledBatch]], sequence: ProducerSequence | None
    ) -> Sequence[Receipt]:
        ends = await self._parked_with_others(ParkingCall(delayed, sequence))
        self._parked += sum(batch.count for _, batch in delayed)
        if self._loop.time() + min(batch.delay_us for _, batch in delayed) / 1e6 < self._wakes_at:
            self._wake.set()
        return [Receipt(SequenceToken(ends[queue])) for queue, _ in delayed]

    async def _parked_with_others(self, call: ParkingCall) -> Mapping[int, int]:
        """Returns where the queues ended before it was parked."""
        answer: asyncio.Future[Mapping[int, int]] = self._loop.create_future()
        self._unparked.append((call, answer))
        if self._parking is None:
            self._parking = self._begun(self._park_all())
        return await answer

    async def _park_all(self) -> None:
        try:
            while self._unparked:
                await self._park_some(_some(self._unparked))
        finally:
            self._parking = None

    async def _park_some(self, some: Sequence[_Unparked]) -> None:
        calls = [call for call, _ in some]
        queues = {queue for call in calls for queue, _ in call.batches}
        try:
            ends = {queue: (await self._adapter.bounds(queue)).next for queue in queues}
            await self.lot.park_all(self._provider, calls)
        except Exception as error:  # noqa: BLE001 (each of them is told)
            for _, answer in some:
                if not answer.done():
                    answer.set_exception(error)
            return
        for _, answer in some:
            if not answer.done():
                answer.set_result(ends)

    # ---- what is due -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause_s, forget_at = FIRST_PAUSE_S, 0.0
        while not self._closing:
            self._wake.clear()
            self._wakes_at = float("inf")  # until it is known, whatever is parked wakes
            try:
                if self._loop.time() >= forget_at:
                    forget_at = self._loop.time() + FORGET_S
                    await self.lot.forget_calls(self._provider)
                wait_s = await self.look()
                pause_s = FIRST_PAUSE_S
                self._failures.pop(None, None)
            except HeadraceError as error:
                self._note_failure(None, str(error))
                wait_s, pause_s = pause_s, min(2 * pause_s, MAX_PAUSE_S)
            except Exception as error:
                log.exception("provider %s: what is due cannot be published yet", self._provider)
                self._failures[None] = str(error), self._loop.time()
                wait_s, pause_s = pause_s, min(2 * pause_s, MAX_PAUSE_S)
            await self._wait(wait_s)

    def _note_failure(self, queue: int | None, why: str) -> None:
        level = logging.DEBUG if queue in self._failures else logging.WARNING
        of = "" if queue is None else f" in queue {queue}"
        log.log(level, "provider %s: what is due%s cannot be published yet: %s", self._provider, of, why)
        self._failures[queue] = why, self._loop.time()

    def _failing(self) -> str:
        """Of a queue that somebody else has published since, nothing is heard any more."""
        heard_since = self._loop.time() - 3 * HOLD_S
        return next((why for why, at in self._failures.values() if at >= heard_since), "")

    async def _wait(self, wait_s: float) -> None:
        self._wakes_at = self._loop.time() + wait_s
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def look(self) -> float:
        """Publish what is due. Returns when to look again, in seconds from now."""
        due_in_s = await self.lot.due_in_s(self._provider, self._holder)
        if due_in_s is None or due_in_s > 0:
            return LOOK_S if due_in_s is None else min(due_in_s, LOOK_S)
        releases = await self.lot.claim(self._provider, self._holder, HOLD_S)
        if not releases:
            return FIRST_PAUSE_S  # somebody else was faster, and is about to publish it
        await self._publish_all(releases)
        return 0.0

    async def _publish_all(self, releases: Sequence[Release]) -> None:
        """One that fails does not hold up the others: it is left to whoever comes first when its time is over."""
        outcomes = await asyncio.gather(*map(self._publish, releases), return_exceptions=True)
        done = [release for release, error in zip(releases, outcomes, strict=True) if error is None]
        if done:
            await self.lot.released(self._provider, {release.queue: release.number for release in done})
        self._released += sum(batch.count for release in done for batch in release.batches)
        for release, error in zip(releases, outcomes, strict=True):
            if error is None:
                self._failures.pop(release.queue, None)
            elif isinstance(error, HeadraceError):
                self._note_failure(release.queue, str(error))
                self._holder = uuid.uuid4().hex
            else:
                raise error

    async def _publish(self, release: Release) -> None:
        if release.damage:
            raise StorageError(release.damage)
        last = await self._adapter.last_sequence(release.producer)
        if last < release.number:
            # After `last`, not after the number before: of that the queue may have lost what it knew, never the other.
            sequence = ProducerSequence(release.producer, release.number, last)
            await self._adapter.enqueue([(release.queue, batch) for batch in release.batches], sequence=sequence)


class _Parts(NamedTuple):
    """The batches of a call: what is delayed, what is not, and which are which."""

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

    def receipts(self, parked: Sequence[Receipt], stored: Sequence[Receipt]) -> Sequence[Receipt]:
        """In the order of the call."""
        later, now = iter(parked), iter(stored)
        return [next(later if delayed else now) for delayed in self.order]


def _some(waiting: deque[_Unparked]) -> Sequence[_Unparked]:
    """The first ones, taken out: so many that a transaction stays short, at least one."""
    some: list[_Unparked] = []
    batches = nbytes = 0
    while waiting and batches < RELEASE_BATCHES and nbytes < RELEASE_BYTES:
        some.append(waiting.popleft())
        batches += len(some[-1][0].batches)
        nbytes += sum(len(batch.encoded) for _, batch in some[-1][0].batches)
    return some


def is_delayed(batch: EventBatch) -> bool:
    return isinstance(batch, ScheduledBatch) and batch.delay_us > 0


def check_delays(delays: str | None) -> None:
    """Raises InvalidArgument for what is no value of the option."""
    if delays not in (None, STORE) and not _is_redis(delays):
        shown = delays.rpartition("@")[2]  # without a password
        raise InvalidArgument(f'delays is "{STORE}", redis://host[:port][/number], or left out, not {shown!r}')


def _is_redis(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("redis", "rediss") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port, or half of an IPv6 address
        return False


def check_parkable(provider: str, name: str, adapter: QueueAdapter, *, private: bool) -> None:
    """Raises InvalidArgument or NotSupported where delays cannot be had, or need not be. `private`: nobody else has the
    place where they are parked, and it goes with the process."""
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
            f"provider {provider!r}: the queues of the adapter {name!r} are one process's own, and what is parked in a "
            f'data directory or in Redis outlasts it: leave out delays, or take "{STORE}" without a data directory'
        )


async def open_lot(provider: str, delays: str, store: ControlStore, owner: str) -> ParkingLot:
    """The place that the option names; `owner` as the adapters get it. Raises NotFound without the package for it,
    InvalidArgument for a server that will not do. One that is away is found out when it is used."""
    if delays == STORE:
        return store.parking()
    kind = await asyncio.to_thread(_redis_parking)  # imports: files
    lot = kind(delays, owner=owner)
    try:
        await lot.check(provider)
    except BaseException:
        await lot.aclose()
        raise
    return lot


def _redis_parking() -> type[RedisParking]:
    try:
        from ..adapters.redis.parking import RedisParking  # noqa: PLC0415 (it needs an extra)
    except ModuleNotFoundError as error:
        raise NotFound(
            f"delays in Redis need the package {error.name!r}, which is not installed: pip install 'headrace[redis]'"
        ) from None
    return RedisParking


def _look_at(answer: asyncio.Future[Any]) -> None:
    """Of an answer that nobody waits for any more: else asyncio says that its error was never looked at."""
    if not answer.cancelled():
        answer.exception()
