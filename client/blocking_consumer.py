"""A consumer for threads without asyncio: `for batch in consumer`, and blocking acknowledgements.

The consumer itself runs in the client's thread. Each call goes there and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import ParamSpec, Protocol, Self, TypeVar, overload

from ..streams.arguments import check_seconds
from ..streams.errors import Closed, HeadraceError
from ..streams.events import Event
from ..streams.identity import SequenceToken, StreamId
from ..streams.openings import ConsumerOpening
from ..streams.subscriptions import GapRecord, Start, SubscriptionDefinition
from .consumer import Consumer
from .held_account import SessionStatistics
from .options import SessionState
from .pulled import Pulled
from .received import ReceivedBatch

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CallInLoop(Protocol):
    """Calls an async function in the client's thread, and returns its result."""

    def __call__(self, function: Callable[_P, Awaitable[_T]], *args: _P.args, **options: _P.kwargs) -> _T: ...


class SyncBatch:
    """Events of one stream, to be acknowledged or rejected: see `ReceivedBatch`. Any thread may do so."""

    __slots__ = ("_batch", "_call")

    def __init__(self, batch: ReceivedBatch, call: CallInLoop) -> None:
        self._batch = batch
        self._call = call

    @property
    def stream(self) -> StreamId:
        return self._batch.stream

    @property
    def token(self) -> SequenceToken:
        """The position of the first event."""
        return self._batch.token

    @property
    def queue(self) -> int:
        return self._batch.queue

    @property
    def attempt(self) -> int:
        """Number of this delivery of the first event, from 1."""
        return self._batch.attempt

    @property
    def redriven(self) -> bool:
        """Whether it is a dead letter that is delivered once more, outside of the order of its stream."""
        return self._batch.redriven

    def __len__(self) -> int:
        return self._batch.count

    def __iter__(self) -> Iterator[Event]:
        return iter(self._batch.events())

    def __repr__(self) -> str:
        return repr(self._batch)

    def events(self, start: int = 0) -> list[Event]:
        """The events from index `start` on, with `stream` and `token` set."""
        return self._batch.events(start)

    def payloads(self) -> list[bytes]:
        """The payloads alone, in order: the cheapest way to read a batch."""
        return self._batch.payloads()

    def ack(self, event: Event | SequenceToken | None = None) -> None:
        """Acknowledge this event, or all of them."""
        self._call(self._batch.ack, event)

    def ack_until(self, event: Event | SequenceToken) -> None:
        """Acknowledge this event and all earlier ones of its stream that the consumer holds, in any batch."""
        self._call(self._batch.ack_until, event)

    def tracing(self) -> AbstractContextManager[None]:
        """A span of OpenTelemetry for the length of a `with`: see `ReceivedBatch.tracing`."""
        return self._batch.tracing()

    def nack(
        self,
        reason: str = "",
        *,
        delay: timedelta | None = None,
        event: Event | SequenceToken | None = None,
        unavailable: bool = False,
        invalid: bool = False,
    ) -> None:
        """Reject this event, or all events that are not acknowledged. They are delivered again: see
        `ReceivedBatch.nack`."""
        self._call(self._batch.nack, reason, delay=delay, event=event, unavailable=unavailable, invalid=invalid)


class SyncPulled(Sequence[SyncBatch]):
    """The batches that one `SyncClient.pull` returned. Acknowledge or reject each. See `Pulled`."""

    def __init__(self, pulled: Pulled, call: CallInLoop) -> None:
        self.pulled = pulled
        self.gaps = pulled.gaps
        """Events that the subscription did not get."""
        self.refused = pulled.refused
        """As in `Pulled`."""
        self._batches = [SyncBatch(batch, call) for batch in pulled]

    def __repr__(self) -> str:
        return f"Sync{self.pulled!r}"

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> SyncBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SyncBatch]: ...
    def __getitem__(self, index: int | slice) -> SyncBatch | Sequence[SyncBatch]:
        return self._batches[index]


class BatchHandover:
    """One call that takes a batch: the client's thread sets `batch`, and the caller sets `returned` or `interrupted`.

    CPython runs signal handlers only at calls and backward jumps. There is neither between the assignment of `returned`
    and the `return` after it, so no exception of a handler comes between the two.
    """

    __slots__ = ("batch", "interrupted", "returned", "task")

    def __init__(self) -> None:
        self.batch: SyncBatch | None = None
        self.task: asyncio.Task[object] | None = None
        self.returned = False
        self.interrupted = False


class BatchHandovers:
    """Takes batches for the callers of one consumer. A batch whose caller was interrupted goes to the next caller."""

    def __init__(self, call: CallInLoop) -> None:
        self._call = call
        self._handovers: list[BatchHandover] = []

    async def take(self, handover: BatchHandover, consumer: Consumer, timeout_s: float | None) -> SyncBatch:
        """Return the next batch, in the client's thread. Raises TimeoutError, and StopAsyncIteration at the end."""
        handover.task = asyncio.current_task()
        handover.batch = self._left_behind()
        self._handovers.append(handover)
        if handover.batch is None:
            async with asyncio.timeout(timeout_s):
                handover.batch = SyncBatch(await anext(consumer), self._call)
        return handover.batch

    def _left_behind(self) -> SyncBatch | None:
        """Return a batch whose caller was interrupted; None if there is none. Forget the calls that are over."""
        batch = None
        for each in list(self._handovers):
            if each.interrupted and batch is None:
                batch = each.batch
                if each.task is not None:
                    each.task.cancel()
                self._handovers.remove(each)
            elif each.returned:
                self._handovers.remove(each)
        return batch


class SyncConsumer:
    """A consumer of a subscription, made by `SyncClient.subscribe`: enter it with `with`, and iterate. See `Consumer`.

    Several threads may take from it. Ctrl-C ends the wait for the next batch, and loses nothing.
    """

    def __init__(self, opening: ConsumerOpening[Consumer], call: CallInLoop) -> None:
        self._opening = opening
        self._call = call
        self._consumer: Consumer | None = None
        self._handovers = BatchHandovers(call)

    def __enter__(self) -> Self:
        try:
            self._consumer = self._call(self._opening.__aenter__)
        except BaseException:  # perhaps an interrupt when it is open already
            with suppress(HeadraceError):
                self._call(self._opening.__aexit__)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Save all acknowledgements and end. Idempotent."""
        if self._consumer is not None:
            with suppress(Closed):  # the client is closed, and has closed the consumer
                self._call(self._consumer.aclose)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SyncBatch:
        """Return the next batch. Ends when the consumer is closed; raises the error if it ended with one."""
        try:
            return self._take(None)
        except StopAsyncIteration:
            raise StopIteration from None

    def take(self, timeout_s: float | None = None) -> SyncBatch | None:
        """Return the next batch; None if none arrives within `timeout_s` seconds, or the consumer is closed."""
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        try:
            return self._take(timeout_s)
        except (TimeoutError, StopAsyncIteration):
            return None

    def _take(self, timeout_s: float | None) -> SyncBatch:
        handover = BatchHandover()
        try:
            batch = self._call(self._handovers.take, handover, self._opened, timeout_s)
            handover.returned = True
            return batch  # no call may come before it: see BatchHandover
        except Closed as closed:
            handover.interrupted = True
            _check_ended(self._consumer, closed)
            raise StopAsyncIteration from None
        except BaseException:
            handover.interrupted = True
            raise

    def opened(self) -> None:
        """Return when the silo has accepted the consumer for the first time. Raises the error if it does not."""
        self._call(self._opened.opened)

    def ended(self) -> None:
        """Return when the consumer is closed. Raises the error if it ended with one."""
        try:
            self._call(self._opened.ended)
        except Closed as closed:
            _check_ended(self._consumer, closed)

    def saved(self) -> None:
        """Return when all earlier acknowledgements are saved."""
        self._call(self._opened.saved)

    def caught_up(self) -> None:
        """Return when all consumers have handled everything stored before the call, except in paused streams."""
        self._call(self._opened.caught_up)

    def seek(self, start: Start | str) -> int:
        """Move the subscription to another position, which may be an earlier one. This affects all its consumers,
        but not those with `keeps_positions`: to move one, start it again with other `positions`. Return the number of
        attached consumers that were not moved, as far as the asked silo knows."""
        return self._call(self._opened.seek, start)

    def resume(self, stream: StreamId) -> bool:
        """Continue a paused stream. Return False if it is not paused."""
        return self._call(self._opened.resume, stream)

    def redrive(self, ids: Sequence[int] | None = None) -> int:
        """Deliver dead letters (all, or those with `ids`) once more. Return how many were requested."""
        return self._call(self._opened.redrive, ids)

    def delete(self) -> None:
        """Close the consumer, and delete the subscription with its progress."""
        self._call(self._opened.delete)

    @property
    def name(self) -> str:
        return self._opened.name

    @property
    def id(self) -> str:
        """The consumer's id."""
        return self._opened.id

    @property
    def definition(self) -> SubscriptionDefinition | None:
        """Definition of the subscription, as it is stored."""
        return self._opened.definition

    @property
    def state(self) -> SessionState:
        return self._opened.state

    @property
    def assignment(self) -> frozenset[int] | None:
        """Mode bound: the queues that this consumer has."""
        return self._opened.assignment

    @property
    def gaps(self) -> list[GapRecord]:
        """The last gaps of the subscription since this consumer was attached."""
        return list(self._opened.gaps)

    @property
    def positions(self) -> Mapping[int, bytes]:
        """With `keeps_positions`: the position in each queue."""
        return dict(self._opened.positions)

    def statistics(self) -> SessionStatistics:
        """A cheap snapshot of the counts of this consumer."""
        return self._opened.statistics()

    @property
    def _opened(self) -> Consumer:
        if self._consumer is None:
            raise Closed("the consumer is not open: use it in a `with` block")
        return self._consumer


def _check_ended(consumer: Consumer | None, closed: Closed) -> None:
    """Check how a consumer ended whose client raises `closed`. Raise its error, or `closed` if it has not ended."""
    if consumer is None or consumer.state is not SessionState.CLOSED:
        raise closed
    if consumer.error is not None:
        raise consumer.error
