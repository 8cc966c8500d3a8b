"""A consumer of a subscription in another process, which takes batches one after the other.

async with client.subscribe("printer", "orders/*", start="earliest") as consumer:
    async for batch in consumer:
        ...
        await batch.ack()
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic, time_ns
from typing import Self, TypeVar

from ..proto.v1 import consumer_pb2 as pb
from ..streams import wire
from ..streams.arguments import check_seconds
from ..streams.background import first_of
from ..streams.errors import Closed, HeadraceError, NotFound
from ..streams.identity import StreamId
from ..streams.subscriptions import GapRecord, Mode, Start, SubscriptionDefinition
from ..streams.transactions import ProviderOrigin
from .consumer_links import ConsumerLinks
from .held_account import SessionStatistics
from .holdings import ConsumerHoldings
from .management import ManagementClient
from .options import SessionState
from .plan import ConsumerPlan
from .received import ReceivedBatch
from .routing import ATTACH_S, Router, TransportCalls

_T = TypeVar("_T")

log = logging.getLogger("headrace.client")

TURN_S = 0.005
"""How long one `async for` goes on before it lets the event loop turn, in seconds."""
KEPT_GAPS = 1000
CLOSE_S = 10.0
"""How long closing may take, in seconds."""


class SubscriptionHandle:
    """A subscription that is consumed here."""

    def __init__(self, management: ManagementClient, name: str) -> None:
        self.name = name
        self._management = management

    async def seek(self, start: Start | str) -> int:
        """Move the subscription to another position, which may be an earlier one. This affects all its consumers,
        but not those with `keeps_positions`. Events that they hold count as given back. Return the number of attached
        consumers that were not moved, as far as the asked silo knows."""
        return await self._management.seek(self.name, start)

    async def _generation(self) -> int | None:
        return await self._management.generation_of(self.name)

    async def resume(self, stream: StreamId) -> bool:
        """Continue a paused stream. Return False if it is not paused."""
        return await self._management.resume(self.name, stream)

    async def redrive(self, ids: Sequence[int] | None = None) -> int:
        """Deliver dead letters (all, or those with `ids`) once more, outside of the order of their streams. Return how
        many were requested. Those that fail again stay dead letters with the new reason."""
        return await self._management.redrive(self.name, ids)


class Consumer(SubscriptionHandle):
    """A consumer of a subscription: `async for batch in consumer`. Made by `client.subscribe`.

    Lost connections, killed silos and queues that move do not concern the user: events that the user holds can be
    acknowledged, and acknowledged events are not delivered again. If a silo refuses the consumer for good (the
    subscription was deleted, the token is not valid any more, another process took over the consumer's id), `async for`
    raises the error. Several tasks may iterate at once.
    """

    def __init__(
        self, management: ManagementClient, plan: ConsumerPlan, on_batches: Callable[[], None] | None = None
    ) -> None:
        super().__init__(management, plan.name)
        self.id = plan.consumer
        """The consumer's id. If none was given, the silo makes one."""
        self.definition: SubscriptionDefinition | None = plan.definition
        """Definition of the subscription, as it is stored. It does not change after the first silo has accepted the
        consumer."""
        self.state = SessionState.CONNECTING
        self.error: BaseException | None = None
        """The error with which it ended, if not by `aclose`."""
        self.gaps = deque[GapRecord](maxlen=KEPT_GAPS)
        """The last gaps of the subscription since this consumer was attached."""
        self.positions: dict[int, bytes] = dict(plan.positions)
        """With `keeps_positions`: the position in each queue, after all saved acknowledgements."""
        self.reconnections = 0
        """How often all connections were lost."""
        self.holdings = ConsumerHoldings(
            plan.max_events,
            plan.max_bytes,
            lambda events, size: self._router.grant(events, size),  # noqa: PLW0108 (routers are replaced)
        )
        """Internal: the batches that it holds."""
        self._plan = plan
        self._started_us = time_ns() // 1000
        self._connection = management.connection
        self._opened = asyncio.Event()
        self._arrived = asyncio.Event()
        self._state_changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._closing = False
        self._turn_ends = 0.0
        self._on_batches = on_batches or self._arrived.set
        self._user = ConsumerLinks(
            self.holdings, self._opening, self._accepted, on_batches=self._take, on_response=self._hear,
            on_change=self._changed,
        )  # fmt: skip
        self._begin_sessions()
        self._task = asyncio.create_task(self._run(), name=f"headrace consumer {plan.name}")

    def __repr__(self) -> str:
        return f"Consumer({self.name!r}, {self.id!r}, {self.state.value})"

    @property
    def assignment(self) -> frozenset[int] | None:
        """Mode bound: the queues that are assigned to this consumer. None in other modes."""
        bound = self.definition is not None and self.definition.mode is Mode.BOUND
        return self.holdings.assignment if bound else None

    # ---- taking ----------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReceivedBatch:
        """Return the next batch. Ends when the consumer is closed. Cancelling it loses nothing."""
        if monotonic() > self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = monotonic() + TURN_S
        batch = self.holdings.take()
        return batch if batch is not None else await self._wait()

    async def _wait(self) -> ReceivedBatch:
        self._connection.check_loop()
        while (batch := self.holdings.take()) is None:
            if self._ended.is_set():
                if self.error is not None:
                    raise self.error
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        self._turn_ends = monotonic() + TURN_S
        return batch

    async def saved(self) -> None:
        """Return when all earlier acknowledgements are saved, however long an outage takes. Raise the error with which
        the consumer ended, or Closed."""
        mark = self.holdings.mark()
        while not self.holdings.is_saved_until(mark):
            if self._ended.is_set():
                raise self.error or Closed(f"{self!r}: its last acknowledgements may not be saved")
            self._state_changed.clear()
            await self._state_changed.wait()

    async def caught_up(self) -> None:
        """Return when all consumers have handled everything stored before the call, except in paused streams.

        Raise the error with which this consumer ended, or Closed if it is closed.
        """

        async def end() -> None:
            await self._ended.wait()
            raise self.error or Closed(f"{self!r}: it gets no more events; call caught_up of the client instead")

        await first_of(self._management.caught_up(self.name), end(), name=f"headrace catching up {self.name}")

    def statistics(self) -> SessionStatistics:
        """A cheap snapshot of the counts of this consumer."""
        return self.holdings.statistics()

    # ---- the end ---------------------------------------------------------------------------------------------------

    async def delete(self) -> None:
        """Close, and delete the subscription with its progress. Its other consumers end."""
        await self.aclose()
        await self._management.delete_subscription(self.name)

    async def aclose(self, timeout_s: float = CLOSE_S) -> None:
        """End in order. When this returns, all acknowledgements are saved, and events that were not acknowledged go to
        other consumers. If that takes longer than `timeout_s` seconds, the consumer ends anyway: then its events
        go to others after its session timeout.

        Idempotent. Iterating ends, and batches cannot be acknowledged any more.
        """
        check_seconds("timeout_s", timeout_s)
        self.holdings.close(f"consumer {self.id or self.name!r} is closed: what it had not acknowledged went back")
        self._closing = True
        self._changed()
        try:
            _, late = await asyncio.wait({self._task}, timeout=timeout_s)
            if late:
                log.warning("%r did not close within %.1f s: its last events may be delivered again", self, timeout_s)
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._end()

    async def ended(self) -> None:
        """Return when it is closed. Raise the error if it ended with one."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    async def opened(self) -> None:
        """Return when a silo has accepted the consumer for the first time, and the owners of all queues if they are
        quick. Raise the error if it does not."""
        await self._opened.wait()
        await self._router.attached(ATTACH_S)
        if self.error is not None:
            raise self.error

    def _end(self) -> None:
        self.holdings.close(f"consumer {self.id or self.name!r} has ended")
        self._set_state(SessionState.CLOSED)
        for event in (self._ended, self._opened, self._arrived, self._state_changed):
            event.set()

    # ---- sessions --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Keep sessions until the consumer is closed, or refused for good."""
        try:
            await self._keep_sessions()
        except Exception as error:  # noqa: BLE001 (it is raised to those who iterate)
            self.error = error
            if self._opened.is_set():  # otherwise `subscribe` raises it
                log.warning("%r ended: %s", self, error)
        finally:
            self._end()

    async def _keep_sessions(self) -> None:
        while True:
            try:
                await self._router.run()
            except HeadraceError as error:
                if not (self._closing and error.retryable):
                    raise
            if self.holdings.is_saved:
                return
            self._begin_sessions()  # a session was lost while closing: attach again

    def _begin_sessions(self) -> None:
        """Make a new router, and grant it credit, before the user can ask for batches."""
        self._router = Router(
            self._user,
            TransportCalls(self._connection),
            timeout_s=self._plan.timeout_s,
            on_open=lambda: self._set_state(SessionState.OPEN),
            on_reconnecting=self._reconnecting,
            on_waiting=lambda error, seconds: log.warning("%r has had no silo for %.0f s: %s", self, seconds, error),
        )
        self.holdings.begin()

    def _reconnecting(self, error: HeadraceError) -> None:
        self.holdings.forget_epochs()
        if not self._closing:
            log.warning("%r lost its silo and reconnects: %s", self, error)
            self.reconnections += 1
            self._set_state(SessionState.RECONNECTING)

    def _opening(self) -> pb.Open:
        plan = self._plan
        opening = pb.Open(
            provider=self._management.provider,
            consumer=self.id,
            session_timeout_ms=round((plan.session_timeout_s or 0) * 1000),
            keeps_positions=plan.keeps_positions,
            concurrent=plan.concurrent,
            started_us=self._started_us,
            positions=[pb.Position(queue=queue, token=token) for queue, token in self.positions.items()],
        )
        if plan.definition is None or self._opened.is_set():
            opening.subscription = plan.name  # a subscription that was deleted meanwhile is not created again
        else:
            opening.definition.CopyFrom(wire.definition_message(plan.definition))
        return opening

    def _accepted(self, opened: pb.Opened) -> None:
        definition = wire.definition_of(opened.definition)
        if self._opened.is_set() and definition != self.definition:  # its selector may be another one
            raise NotFound(
                f"subscription {self.name!r} was deleted, and created anew with another definition: subscribe again"
            )
        self.id, self.definition = opened.consumer, definition
        shared = self.definition.mode is not Mode.BROADCAST
        origin = ProviderOrigin(opened.origin, self._management.provider, self.name, shared, self._generation)
        self.holdings.account.origin = origin
        self._opened.set()

    def _take(self) -> None:
        if self.state is not SessionState.OPEN:
            self._set_state(SessionState.OPEN)
        self._on_batches()

    def _hear(self, response: pb.SubscribeResponse) -> None:
        if response.HasField("progress"):
            caught_up = self._router.progress().caught_up and not self.holdings.waiting
            self._set_state(SessionState.CAUGHT_UP if caught_up else SessionState.OPEN)
        for saved in response.saved:
            if saved.HasField("position"):
                self.positions[saved.queue] = saved.position.token
        for gap in response.gaps:
            self._note_gap(wire.gap_of(gap, self._management.provider, self.name))
        self._changed()

    def _changed(self) -> None:
        """Notify `saved`. If the consumer closes, end the sessions as soon as that saves all acknowledgements."""
        self._state_changed.set()
        if self._closing and self.holdings.can_close:
            self._router.close()

    def _note_gap(self, gap: GapRecord) -> None:
        log.warning("%r does not get %s to %s of queue %d: %s", self, gap.low, gap.high, gap.queue, gap.reason)
        self.gaps.append(gap)
        if self._plan.on_gap is not None:
            _notify(self._plan.on_gap, gap)

    def _set_state(self, state: SessionState) -> None:
        if state is self.state or self.state is SessionState.CLOSED:
            return
        self.state = state
        if self._plan.on_state is not None:
            _notify(self._plan.on_state, state)


def _notify(callback: Callable[[_T], None], news: _T) -> None:
    try:
        callback(news)
    except Exception:
        log.exception("%r raised", callback)
