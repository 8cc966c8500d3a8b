"""Consuming from a silo: batches to be taken in turn, or a handler that they are given to.

async with client.subscribe("printer", "orders/*", start="earliest") as consumer:
    async for batch in consumer:
        ...
        await batch.ack()

subscription = await client.subscribe("printer", "orders/*", handler)
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, Literal, Self, TypeVar, Unpack, cast, overload
from weakref import WeakSet

from ..proto.v1 import consumer_pb2 as pb
from ..streams import wire
from ..streams.arguments import (
    check_callable,
    check_flag,
    check_integer,
    check_options,
    check_seconds,
    check_text,
    refused,
)
from ..streams.background import first_of
from ..streams.errors import Busy, Closed, HeadraceError, InvalidArgument, NotSupported, Unavailable
from ..streams.frames import split
from ..streams.handlers import (
    CONCURRENCY,
    HANDLER_OPTIONS,
    AnyHandler,
    BatchObserver,
    EventHandler,
    Handler,
    Observer,
    check_no_definition_options,
    check_no_handler_options,
    define,
)
from ..streams.identity import StreamId
from ..streams.openings import ConsumerOpening, HandlerOpening
from ..streams.subscriptions import (
    GapRecord,
    Mode,
    Selector,
    Start,
    SubscriptionDefinition,
    check_consumer,
    check_subscription_name,
)
from .conversation import METHOD, Conversation, message_of
from .handling import RemoteHandling
from .management import Management, parsed
from .options import ConsumerOptions, RemoteHandlerOptions, SessionState
from .received import ReceivedBatch
from .session import MAX_BYTES, MAX_EVENTS, Session, SessionStatistics
from .transport import Transport, reconnect_backoff

_T = TypeVar("_T")
_A = TypeVar("_A", "Consumer", "RemoteSubscription")

ReceivedBatchHandler = Callable[[ReceivedBatch], Awaitable[None]]

log = logging.getLogger("headrace.client")

TURN_S = 0.005
"""How long one `async for` goes on before it lets the loop do something else, in seconds."""
KEPT_GAPS = 1000
CLOSE_S = 10.0
"""How long closing may take, in seconds."""
SETTLE_S = 2.0
"""Where a connection is lost while closing, the next one has so long to be asked for what was acknowledged."""
LEAVE_S = 1.0
"""How long the silo may take to let a consumer leave, in seconds."""
MAX_PULL_S = 24 * 3600
"""How long a pull may wait, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a consumer is to do: the arguments of `subscribe`."""

    name: str
    definition: SubscriptionDefinition | None
    consumer: str
    session_timeout_s: float | None
    keeps_positions: bool
    positions: Mapping[int, bytes]
    max_events: int
    max_bytes: int
    timeout_s: float | None
    on_state: Callable[[SessionState], None] | None
    on_gap: Callable[[GapRecord], None] | None
    concurrent: bool = False
    """It works on many streams at once: the silo sends a few events of many streams, not many events of a few."""

    def __post_init__(self) -> None:
        check_subscription_name(self.name)
        if self.consumer != "":
            check_consumer(self.consumer)
        for name, value in (("session_timeout_s", self.session_timeout_s), ("timeout_s", self.timeout_s)):
            if value is not None:
                check_seconds(name, value, above_zero=True)
        check_integer("max_events", self.max_events, 1)
        check_integer("max_bytes", self.max_bytes, 1)
        check_callable("on_state", self.on_state)
        check_callable("on_gap", self.on_gap)
        check_flag("keeps_positions", self.keeps_positions)
        if not isinstance(self.positions, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] (users may err)
            raise refused("positions", self.positions, "a mapping of queues to the positions of a consumer")
        if self.positions and not self.keeps_positions:
            raise InvalidArgument("positions are for a consumer that keeps them: give keeps_positions=True, too")


def plan_of(call: str, name: str, selector: Selector | None, options: Mapping[str, Any]) -> Plan:
    """The plan of a consumer from the options of `call`. Raises InvalidArgument."""
    check_options(call, options, ConsumerOptions.__annotations__, HANDLER_OPTIONS)
    check_text("name", name)
    definition = None
    if selector is not None:
        mode = Mode.of(options.get("mode", Mode.SHARED))
        definition = define(name, selector, {**options, "mode": mode})
    else:
        check_no_definition_options(name, options)
    return Plan(
        name=name,
        definition=definition,
        consumer=options.get("consumer", ""),
        session_timeout_s=options.get("session_timeout_s"),
        keeps_positions=options.get("keeps_positions", False),
        positions={} if options.get("positions") is None else options["positions"],
        max_events=options.get("max_events", MAX_EVENTS),
        max_bytes=options.get("max_bytes", MAX_BYTES),
        timeout_s=options.get("timeout_s"),
        on_state=options.get("on_state"),
        on_gap=options.get("on_gap"),
    )


class Attached:
    """What a consumer and a subscription with a handler have in common: the subscription itself."""

    def __init__(self, management: Management, name: str, session: Session) -> None:
        self.name = name
        self._management = management
        self._session = session

    async def seek(self, start: Start | str) -> None:
        """Go on from another position, also an earlier one. All consumers of the subscription do, and what is in their
        hands counts as given back."""
        await self._management.seek(self.name, start)

    async def resume(self, stream: StreamId) -> bool:
        """Go on with a paused stream. False where it is not paused."""
        return await self._management.resume(self.name, stream)

    async def redrive(self, ids: Sequence[int] | None = None) -> int:
        """Deliver dead letters (all, or those with `ids`) once more, out of line. Returns how many were asked for; what
        fails again stays a dead letter with its new reason."""
        return await self._management.redrive(self.name, ids)


class Consumer(Attached):
    """A consumer of a subscription: `async for batch in consumer`. Made by `client.subscribe`.

    Lost connections and silos that come back are none of the user's business: what he holds he may go on to
    acknowledge, and nothing that he acknowledged comes again. Where the silo refuses for good (the subscription was
    deleted, the token is not valid any more, another process took over this consumer's id), `async for` raises why.
    Several tasks may iterate at once.
    """

    def __init__(
        self, management: Management, plan: Plan, session: Session, on_batches: Callable[[], None] | None = None
    ) -> None:
        super().__init__(management, plan.name, session)
        self.id = plan.consumer
        """The consumer's id. Where none was given, the silo makes one: it is known once open."""
        self.definition = plan.definition
        """The subscription's, as it is stored."""
        self.state = SessionState.CONNECTING
        self.error: BaseException | None = None
        """Why it ended, where not by `aclose`."""
        self.assignment: frozenset[int] | None = None
        """Mode bound: the queues that are this consumer's."""
        self.gaps = deque[GapRecord](maxlen=KEPT_GAPS)
        """What the subscription did not get while this consumer was attached, the last ones."""
        self.positions: dict[int, bytes] = dict(plan.positions)
        """With `keeps_positions`: where it is, by queue. Give it back to go on behind what is acknowledged by now."""
        self.reconnections = 0
        self._plan = plan
        self._connection = management.connection
        self._loop = asyncio.get_running_loop()
        self._conversation: Conversation | None = None
        self._opened = asyncio.Event()
        self._arrived = asyncio.Event()
        self._news = asyncio.Event()
        self._over = asyncio.Event()
        self._closing = False
        self._turn_ends = 0.0
        self._on_batches = on_batches or self._arrived.set
        session.on_pending = self._pending
        self._task = self._loop.create_task(self._run(), name=f"headrace consumer {plan.name}")

    def __repr__(self) -> str:
        return f"Consumer({self.name!r}, {self.id!r}, {self.state.value})"

    # ---- taking ----------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReceivedBatch:
        """The next batch. Ends when the consumer is closed. To be cancelled here loses nothing."""
        if monotonic() > self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = monotonic() + TURN_S
        batch = self._session.take()
        return batch if batch is not None else await self._wait()

    async def _wait(self) -> ReceivedBatch:
        self._connection.check_loop()
        while (batch := self._session.take()) is None:
            if self._over.is_set():
                if self.error is not None:
                    raise self.error
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        self._turn_ends = monotonic() + TURN_S
        return batch

    async def saved(self) -> None:
        """Return when everything that was acknowledged before is saved, however long an outage takes. Raises why the
        consumer ended, if it did."""
        while not self._session.saved_all:
            if self._over.is_set():
                raise self.error or Closed(f"{self!r}: what it acknowledged last may not be saved")
            self._news.clear()
            await self._news.wait()

    async def caught_up(self) -> None:
        """Return when all consumers have handled everything stored before the call, except in paused streams.

        Raise the error with which this consumer ended, or Closed if it is closed.
        """

        async def end() -> None:
            await self._over.wait()
            raise self.error or Closed(f"{self!r}: it gets no more events; call caught_up of the client instead")

        await first_of(self._management.caught_up(self.name), end(), name=f"headrace catching up {self.name}")

    def statistics(self) -> SessionStatistics:
        """A cheap snapshot of what is held, owed and was done."""
        return self._session.statistics()

    # ---- the end ---------------------------------------------------------------------------------------------------

    async def delete(self) -> None:
        """Close, and delete the subscription with its progress. Its other consumers are told."""
        await self.aclose()
        await self._management.delete_subscription(self.name)

    async def aclose(self, timeout_s: float = CLOSE_S) -> None:
        """End in order. What was acknowledged is saved when this returns, what was not goes to other consumers. After
        `timeout_s` seconds it ends all the same, and the silo misses the consumer after its session timeout.

        Idempotent. Iterating ends, and batches cannot be acknowledged any more.
        """
        check_seconds("timeout_s", timeout_s)
        self._session.close(f"consumer {self.id or self.name!r} is closed: what it had not acknowledged went back")
        self._closing = True
        if self._conversation is not None:
            self._conversation.close()
        elif self._session.settled:
            self._task.cancel()
        try:
            _, late = await asyncio.wait({self._task}, timeout=timeout_s)
            if late:
                log.warning("%r did not close within %.1f s: what it acknowledged last may come again", self, timeout_s)
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._end()

    async def ended(self) -> None:
        """Return when it is closed; raises why where it ended otherwise."""
        await self._over.wait()
        if self.error is not None:
            raise self.error

    async def opened(self) -> None:
        """Return when the silo has taken it, for the first time. Raises why where it does not."""
        await self._opened.wait()
        if self.error is not None:
            raise self.error

    def _end(self) -> None:
        self._session.close(f"consumer {self.id or self.name!r} has ended")
        self._set_state(SessionState.CLOSED)
        for event in (self._over, self._opened, self._arrived, self._news):
            event.set()

    # ---- connections -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Converse, again after every loss, until closed or refused for good."""
        try:
            await self._attend()
        except Exception as error:  # noqa: BLE001 (whoever iterates is told)
            self.error = error
            if self._opened.is_set():  # otherwise the caller of `subscribe` gets it
                log.warning("%r ended: %s", self, error)
        finally:
            self._end()

    async def _attend(self) -> None:
        backoff, since = reconnect_backoff(), self._loop.time()
        while True:
            error = await self._converse()
            if self._closing and (error is None or self._session.settled):
                return
            if self.state in (SessionState.OPEN, SessionState.CAUGHT_UP):
                backoff.reset()
                since = self._loop.time()
            pause_s = backoff.next_s()
            error = error or Unavailable(f"the silo ended the call of {self!r}")
            if not self._worth_another(error, self._loop.time() + pause_s - since):
                raise error
            self._reconnects(error, backoff.failures)
            await asyncio.sleep(pause_s)

    def _reconnects(self, error: HeadraceError, failures: int) -> None:
        level = logging.WARNING if failures == 1 else logging.DEBUG
        log.log(level, "%r lost its silo and reconnects: %s", self, error)
        if self._opened.is_set() and failures == 1:
            self.reconnections += 1
            self._set_state(SessionState.RECONNECTING)

    def _worth_another(self, error: HeadraceError, lasted_s: float) -> bool:
        passing = error.retryable or (isinstance(error, Busy) and self._opened.is_set())
        return passing and (self._plan.timeout_s is None or lasted_s < self._plan.timeout_s)

    async def _converse(self) -> HeadraceError | None:
        """One call. Returns what ended it, None where it ended in order."""
        try:
            call = self._connection.stream(METHOD)
            self._conversation = conversation = Conversation(
                call, self._session, on_response=self._hear, on_batches=self._tell_batches
            )
            if self._closing:
                self._loop.call_later(SETTLE_S, conversation.close)
            await conversation.run(self._opening(), self._session.open())
        except HeadraceError as error:
            return error
        finally:
            self._conversation = None
            self._session.lost()
        return None

    def _opening(self) -> pb.Open:
        plan = self._plan
        opening = pb.Open(
            provider=self._management.provider,
            consumer=self.id,
            session_timeout_ms=round((plan.session_timeout_s or 0) * 1000),
            keeps_positions=plan.keeps_positions,
            concurrent=plan.concurrent,
            positions=[pb.Position(queue=queue, token=token) for queue, token in self.positions.items()],
        )
        if plan.definition is None or self._opened.is_set():
            opening.subscription = plan.name  # a subscription that was deleted meanwhile is not made again
        else:
            opening.definition.CopyFrom(wire.definition_message(plan.definition))
        return opening

    def _pending(self) -> None:
        if self._conversation is not None:
            self._conversation.wake()

    def _tell_batches(self) -> None:
        if self.state is not SessionState.OPEN:
            self._set_state(SessionState.OPEN)
        self._on_batches()

    # ---- what the silo says ----------------------------------------------------------------------------------------

    def _hear(self, response: pb.SubscribeResponse) -> None:
        self._news.set()
        if response.HasField("opened"):
            self.id = response.opened.consumer
            self.definition = wire.definition_of(response.opened.definition)
            self._set_state(SessionState.OPEN)
            self._opened.set()
        if response.HasField("progress"):
            caught_up = response.progress.caught_up and not self._session.waiting
            self._set_state(SessionState.CAUGHT_UP if caught_up else SessionState.OPEN)
        if response.HasField("assignment"):
            self.assignment = frozenset(response.assignment.queues)
        for position in response.positions:
            self.positions[position.queue] = position.token
        for gap in response.gaps:
            self._note_gap(wire.gap_of(gap, self._management.provider, self.name))
        if response.HasField("closing") and self._conversation is not None:
            log.info("%r: the silo is going to end the call (%s)", self, response.closing.reason)
            self._conversation.leave()

    def _note_gap(self, gap: GapRecord) -> None:
        log.warning("%r does not get %s to %s of queue %d: %s", self, gap.low, gap.high, gap.queue, gap.reason)
        self.gaps.append(gap)
        if self._plan.on_gap is not None:
            _tell(self._plan.on_gap, gap)

    def _set_state(self, state: SessionState) -> None:
        if state is self.state or self.state is SessionState.CLOSED:
            return
        self.state = state
        if self._plan.on_state is not None:
            _tell(self._plan.on_state, state)


class RemoteSubscription(Attached):
    """A subscription that a handler in this process consumes. Made by `await client.subscribe(..., handler)`."""

    def __init__(self, management: Management, plan: Plan, handler: Handler, concurrency: int) -> None:
        session = Session(plan.max_events, plan.max_bytes)
        super().__init__(management, plan.name, session)
        self._handling = RemoteHandling(plan.name, session, handler, concurrency, self._attempts)
        self.consumer = Consumer(management, plan, session, self._handling.wake)
        """Its state, gaps and statistics. It is not to be iterated."""
        self._closing: asyncio.Task[None] | None = None
        self._watching = asyncio.create_task(self._watch(), name=f"headrace subscription {plan.name}")

    def __repr__(self) -> str:
        return f"RemoteSubscription({self.name!r}, {self.consumer.id!r}, {self.consumer.state.value})"

    @property
    def definition(self) -> SubscriptionDefinition | None:
        """As it is stored."""
        return self.consumer.definition

    def _attempts(self) -> int:
        return self.definition.retry.max_attempts if self.definition else 1

    async def close(self, drain_s: float = CLOSE_S) -> None:
        """Stop consuming: running handlers have `drain_s` seconds to end. It stays durable: events are kept for it,
        and other consumers go on. Idempotent.

        Raises InvalidArgument in its own handler, for whose end it would wait.
        """
        check_seconds("drain_s", drain_s)
        if self._handling.in_handler():
            raise InvalidArgument(f"subscription {self.name!r} would wait for the handler that closes it: start a task")
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(drain_s), name=f"headrace close {self.name}")
        # Whoever is cancelled while waiting does not leave the rest half closed.
        await asyncio.shield(self._closing)

    async def caught_up(self) -> None:
        """As `Consumer.caught_up`."""
        await self.consumer.caught_up()

    async def aclose(self) -> None:
        """`close`."""
        await self.close()

    async def _close(self, drain_s: float) -> None:
        await self._handling.stop(drain_s)
        await self.consumer.aclose()
        await self._watching
        await self._handling.notify_completed(drain_s)

    async def delete(self) -> None:
        """Stop consuming, and delete the subscription with its progress. Its other consumers are told."""
        await self.close()
        await self._management.delete_subscription(self.name)

    async def ended(self) -> None:
        """Return when it is closed; raises why where it ended otherwise."""
        await self.consumer.ended()

    async def _watch(self) -> None:
        """Where it ends by itself, handlers are not left running for nothing, and the observer is told."""
        try:
            await self.consumer.ended()
        except Exception as error:  # noqa: BLE001 (whatever ended it)
            await self._handling.stop(0.0)
            await self._handling.notify_error(error)


async def _opened(attached: _A, consumer: Consumer) -> _A:
    try:
        await consumer.opened()
    except BaseException:
        await attached.aclose()
        raise
    return attached


class Consuming(Management):
    """What a client does to consume."""

    def __init__(self, connection: Transport, provider: str, timeout_s: float) -> None:
        super().__init__(connection, provider, timeout_s)
        self._attached = WeakSet[Consumer | RemoteSubscription]()
        self._pulling = set[tuple[str, str]]()
        """Subscription and consumer of each `pull`: these consumers leave when the client is closed."""

    @overload
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None,
        handler: EventHandler | Observer | BatchObserver,
        *,
        batch: Literal[False] = False,
        **options: Unpack[RemoteHandlerOptions],
    ) -> Coroutine[Any, Any, RemoteSubscription]: ...
    @overload
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None,
        handler: ReceivedBatchHandler | BatchObserver,
        *,
        batch: Literal[True],
        **options: Unpack[RemoteHandlerOptions],
    ) -> Coroutine[Any, Any, RemoteSubscription]: ...
    @overload
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None = None,
        handler: None = None,
        **options: Unpack[ConsumerOptions],
    ) -> ConsumerOpening[Consumer]: ...
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None = None,
        handler: AnyHandler | ReceivedBatchHandler | None = None,
        **options: Any,
    ) -> Coroutine[Any, Any, RemoteSubscription] | ConsumerOpening[Consumer]:
        """Consume the durable subscription `name`, which is created if it does not exist.

        Without `handler`, enter the result, and take batches: `async with client.subscribe(...) as consumer: async for
        batch in consumer`. With one, await the result: `await client.subscribe(..., handler)`. Every event published
        afterwards is delivered.

        `selector`, `handler`, `batch`, `start`, `retry`, `on_failure`, `slow_consumer`, `circuit_breaker` and
        `concurrency` are as for a provider in the silo (a failing handler's events come again as `retry` says). Without
        `selector` the subscription has to exist. A `filter` is for handlers in the silo only.

        `consumer` is the id of this consumer within its group. A consumer with the same id takes over from the one
        before; if it is empty, the silo makes one. With `mode` BROADCAST it names the stored position, unless the
        client keeps it: with `keeps_positions`, `consumer.positions` are to be given back as `positions`.

        `max_events` and `max_bytes` bound the events that wait here and those in your hands: all that are not
        acknowledged count. A silo gives up a consumer that is silent for `session_timeout_s`; None: the silo's default.
        After a lost connection the client tries to reconnect for `timeout_s`; None: without a limit.

        `on_state` and `on_gap` are called with changes. They must not block.

        Raises InvalidArgument at once for wrong arguments; when awaited or entered, DefinitionConflict if `name` exists
        with another definition, NotFound, Busy if a handler in a silo serves it, PermissionDenied, Unavailable.
        """
        if options.pop("filter", None) is not None:
            raise NotSupported(
                f"subscription {name!r}: a filter is a function, and runs only in the silo with its handler: let the "
                "handler here pass over what it does not want"
            )
        chosen = None if selector is None else Selector.of(selector)
        if handler is None:
            check_no_handler_options(name, options)
            plan = plan_of("client.subscribe", name, chosen, options)
            return ConsumerOpening(partial(self.open_consumer, plan), "client", name)
        check_options("client.subscribe", options, {*HANDLER_OPTIONS, *ConsumerOptions.__annotations__})
        of_consumer = {key: value for key, value in options.items() if key not in ("batch", "concurrency")}
        plan = plan_of("client.subscribe", name, chosen, of_consumer)
        handled = Handler.of(handler, batch=options.get("batch", False))
        concurrency = check_integer("concurrency", options.get("concurrency", CONCURRENCY), 1)
        return HandlerOpening(cast("Any", self._open_subscription(plan, handled, concurrency)), "client", name)

    async def open_consumer(self, plan: Plan) -> Consumer:
        """Attach a consumer. It is closed with the client, at the latest. Raises as `subscribe` does."""
        self.connection.check_open()
        consumer = Consumer(self, plan, Session(plan.max_events, plan.max_bytes))
        self._attached.add(consumer)
        return await _opened(consumer, consumer)

    async def _open_subscription(self, plan: Plan, handler: Handler, concurrency: int) -> RemoteSubscription:
        self.connection.check_open()
        subscription = RemoteSubscription(self, replace(plan, concurrent=concurrency > 1), handler, concurrency)
        self._attached.add(subscription)
        return await _opened(subscription, subscription.consumer)

    async def pull(
        self,
        name: str,
        consumer: str,
        *,
        max_events: int = 0,
        max_bytes: int = 0,
        wait_s: float = 0.0,
        session_timeout_s: float | None = None,
        after: Pulled | None = None,
    ) -> Pulled:
        """What is there of subscription `name` for `consumer`, at most so many events and bytes (0: 1,000 and 1 MiB),
        after waiting for up to `wait_s` seconds while there is nothing.

        What is returned is in flight until it is acknowledged, or the consumer has not called for its session timeout.
        Acknowledge or reject batches, and then give what was returned to `acknowledge`, or here as `after`.

        Raises InvalidArgument, NotFound, Busy, PermissionDenied, LimitExceeded, Unavailable.
        """
        check_text("name", name)
        _check_pull(max_events, max_bytes, wait_s, session_timeout_s)
        if after is not None:
            _check_pulled(after)
        request = pb.PullRequest(
            provider=self._provider,
            subscription=name,
            consumer=check_consumer(consumer),
            max_events=max_events,
            max_bytes=max_bytes,
            wait_ms=round(wait_s * 1000),
            session_timeout_ms=round((session_timeout_s or 0) * 1000),
        )
        if after is not None:
            marked = after.marked()
            request.acknowledgements.extend(marked.acknowledgements)
            request.rejections.extend(marked.rejections)
        self._pulling.add((name, consumer))
        answer = await self._connection.call(
            "ConsumerService/Pull", request.SerializeToString(), timeout_s=self._timeout_s + wait_s
        )
        return Pulled(name, request.consumer, answer, self._provider)

    async def acknowledge(self, pulled: Pulled) -> int:
        """Tell the silo what became of what `pull` returned. Returns how much of that was too late: those events come
        again, or are somebody else's by now."""
        marked = _check_pulled(pulled).marked()
        request = pb.AcknowledgeRequest(
            provider=self._provider,
            subscription=pulled.name,
            consumer=pulled.consumer,
            acknowledgements=marked.acknowledgements,
            rejections=marked.rejections,
        )
        answer = await self._connection.call(
            "ConsumerService/Acknowledge", request.SerializeToString(), timeout_s=self._timeout_s
        )
        return len(parsed(pb.AcknowledgeResponse, answer).refused)

    async def close_consumers(self) -> None:
        """Close all that `subscribe` opened, and let the consumers of `pull` leave."""
        pulling, self._pulling = self._pulling, set[tuple[str, str]]()
        leaving = [self._leave(name, consumer) for name, consumer in pulling]
        await asyncio.gather(*[each.aclose() for each in list(self._attached)], *leaving)

    async def _leave(self, name: str, consumer: str) -> None:
        """Let a consumer leave. If the silo does not hear of it, the silo waits until the session timeout."""
        request = pb.PullRequest(provider=self._provider, subscription=name, consumer=consumer, leave=True)
        try:
            await self._connection.unary("ConsumerService/Pull", request.SerializeToString(), timeout_s=LEAVE_S)
        except HeadraceError as error:
            log.info("consumer %r did not leave subscription %r in order: %s", consumer, name, error)


class Pulled(Sequence[ReceivedBatch]):
    """What one `pull` returned: batches to be acknowledged or rejected, which `client.acknowledge` then tells."""

    def __init__(self, name: str, consumer: str, answer: bytes, provider: str) -> None:
        self.name = name
        self.consumer = consumer
        delivered, rest = split(answer)
        response = parsed(pb.PullResponse, rest)
        self.gaps = [wire.gap_of(gap, provider, name) for gap in response.gaps]
        """What the subscription did not get."""
        self.refused = len(response.refused)
        """How much of what was acknowledged with the call was too late."""
        self._session = Session()
        self._session.open()
        self._session.receive(delivered, 0)
        self._batches = list(iter(self._session.take, None))

    def __repr__(self) -> str:
        return f"Pulled({self.name!r}, {self.consumer!r}, {self._batches!r})"

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> ReceivedBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ReceivedBatch]: ...
    def __getitem__(self, index: int | slice) -> ReceivedBatch | Sequence[ReceivedBatch]:
        return self._batches[index]

    def marked(self) -> pb.SubscribeRequest:
        """What became of the batches since the last time."""
        request = self._session.request()
        return pb.SubscribeRequest() if request is None else message_of(request)


def _check_pull(max_events: int, max_bytes: int, wait_s: float, session_timeout_s: float | None) -> None:
    for name, number in (("max_events", max_events), ("max_bytes", max_bytes)):
        check_integer(name, number, 0, (1 << 32) - 1)
    check_seconds("wait_s", wait_s, most=MAX_PULL_S)
    if session_timeout_s is not None:
        check_seconds("session_timeout_s", session_timeout_s, most=MAX_PULL_S)


def _check_pulled(pulled: object) -> Pulled:
    if not isinstance(pulled, Pulled):
        raise InvalidArgument(f"what is acknowledged is what `pull` returned, not {type(pulled).__name__}: give that")
    return pulled


def _tell(callback: Callable[[_T], None], news: _T) -> None:
    try:
        callback(news)
    except Exception:
        log.exception("%r raised", callback)
