"""Consuming from silos: batches to be taken one after the other, handlers, and single pulls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, Unpack, cast, overload
from weakref import WeakSet

from ..proto.v1 import consumer_pb2 as pb
from ..streams import tracing
from ..streams.arguments import check_flag, check_integer, check_options, check_seconds, check_text
from ..streams.codecs import Codecs, P
from ..streams.errors import HeadraceError, InvalidArgument, NotSupported
from ..streams.handlers import (
    CONCURRENCY,
    HANDLER_OPTIONS,
    AnyHandler,
    BatchObserver,
    EventHandler,
    Handler,
    Observer,
    PayloadHandler,
    check_effects,
    check_no_handler_options,
    handler_with_transaction,
)
from ..streams.identity import StreamId
from ..streams.openings import ConsumerOpening, HandlerOpening
from ..streams.subscriptions import Mode, Selector, check_consumer
from ..streams.transactions import BatchEffectHandler, EventEffectHandler, HandlerEffects, PayloadEffectHandler
from .consumer import Consumer
from .handler_effects import HandlerWithEffects
from .held_account import check_origin
from .management import ManagementClient, parsed
from .options import ConsumerOptions, RemoteHandlerOptions
from .plan import ConsumerPlan, plan_of
from .pulled import Pulled
from .received import ReceivedBatch
from .remote_subscription import RemoteSubscription
from .transport import Transport

_A = TypeVar("_A", Consumer, RemoteSubscription)
_T = TypeVar("_T")

ReceivedBatchHandler = Callable[[ReceivedBatch], Awaitable[None]]

log = logging.getLogger("headrace.client")

LEAVE_S = 1.0
"""How long the silo may take to let a consumer leave, in seconds."""
MAX_PULL_S = 24 * 3600
"""The longest wait of a pull, in seconds."""


class ConsumingClient(ManagementClient):
    """The calls of a client that consume events."""

    def __init__(self, connection: Transport, provider: str, timeout_s: float, codecs: Codecs | None = None) -> None:
        super().__init__(connection, provider, timeout_s)
        self.codecs = codecs or Codecs()
        self._attached = WeakSet[Consumer | RemoteSubscription]()
        self._pulling = set[tuple[str, str]]()
        """Subscription and consumer of each `pull`: these consumers leave when the client is closed."""

    @overload
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None,
        handler: EventHandler | PayloadHandler[P] | Observer | BatchObserver,
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
        selector: str | StreamId | None,
        handler: EventEffectHandler[_T] | PayloadEffectHandler[P, _T],
        *,
        batch: Literal[False] = False,
        effects: HandlerEffects[_T],
        **options: Unpack[RemoteHandlerOptions],
    ) -> Coroutine[Any, Any, RemoteSubscription]: ...
    @overload
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None,
        handler: BatchEffectHandler[_T],
        *,
        batch: Literal[True],
        effects: HandlerEffects[_T],
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
        """Consume the durable subscription `name`. It is created if it does not exist.

        Without `handler`, enter the result, and take batches: `async with client.subscribe(...) as consumer: async for
        batch in consumer`. With one, await the result: `await client.subscribe(..., handler)`. Every event published
        afterwards is delivered.

        `selector`, `handler`, `batch`, `start`, `retry`, `on_failure`, `slow_consumer`, `circuit_breaker` and
        `concurrency` are as for a provider in the silo (events of a failing handler are delivered again as `retry`
        says). Without `selector` the subscription has to exist. A `filter` works only for handlers in the silo. With
        `effects`, the handler takes a transaction, too (docs/effects.md).

        `consumer` is the id of this consumer within its group. A consumer with the same id takes over from the earlier
        one. If it is empty, the silo makes one. With `mode` BROADCAST it names the stored position, unless the client
        keeps its positions: with `keeps_positions`, give `consumer.positions` back as `positions`.

        `max_events` and `max_bytes` limit the events that are not acknowledged: those that wait here, and those that
        you hold. A silo gives up a consumer that is silent for `session_timeout_s`; None: the silo's default. After a
        lost connection the client tries to reconnect for `timeout_s`; None: without a limit.

        `on_state` and `on_gap` are called with changes. They must not block.

        Raises InvalidArgument at once for wrong arguments. When the result is awaited or entered, raises
        DefinitionConflict if `name` exists with another definition, NotFound (also if the database of `effects` lacks
        their tables), Busy if a handler in a silo serves it,
        PermissionDenied, Unavailable.
        """
        if options.pop("filter", None) is not None:
            raise NotSupported(
                f"subscription {name!r}: a filter is a function, and runs only in the silo with its handler: let the "
                "handler here ignore the events that it does not want"
            )
        chosen = None if selector is None else Selector.of(selector)
        if handler is None:
            check_no_handler_options(name, options)
            plan = plan_of("client.subscribe", name, chosen, options)
            return ConsumerOpening(partial(self.open_consumer, plan), "client", name)
        check_options("client.subscribe", options, {*HANDLER_OPTIONS, "effects", *ConsumerOptions.__annotations__})
        of_consumer = {key: value for key, value in options.items() if key not in ("batch", "concurrency", "effects")}
        plan = plan_of("client.subscribe", name, chosen, of_consumer)
        batch, effects = options.get("batch", False), options.get("effects")
        if effects is None:
            handled = Handler.of(handler, batch=batch, codecs=self.codecs)
        else:
            check_flag("batch", batch)
            check_effects(effects, handler, batch=batch)
            if plan.definition is not None and plan.definition.mode is Mode.BROADCAST:
                raise NotSupported(f"subscription {name!r} has mode broadcast: effects are for other modes")
            with_transaction = handler_with_transaction(handler, self.codecs, batch=batch)
            handled = HandlerWithEffects(effects, with_transaction, batch=batch)
        concurrency = check_integer("concurrency", options.get("concurrency", CONCURRENCY), 1)
        return HandlerOpening(cast("Any", self._open_subscription(plan, handled, concurrency)), "client", name)

    async def open_consumer(self, plan: ConsumerPlan) -> Consumer:
        """Attach a consumer. It is closed with the client, at the latest. Raises as `subscribe` does."""
        self.connection.check_open()
        consumer = Consumer(self, plan)
        self._attached.add(consumer)
        return await _opened(consumer, consumer)

    async def _open_subscription(
        self, plan: ConsumerPlan, handler: Handler | HandlerWithEffects, concurrency: int
    ) -> RemoteSubscription:
        self.connection.check_open()
        if isinstance(handler, HandlerWithEffects):
            await handler.check()
        subscription = RemoteSubscription(self, replace(plan, concurrent=concurrency > 1), handler, concurrency)
        self._attached.add(subscription)
        await _opened(subscription, subscription.consumer)
        if isinstance(handler, HandlerWithEffects):
            try:
                check_origin(subscription.consumer.holdings.account.origin)
            except NotSupported:
                await subscription.aclose()
                raise
        return subscription

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
        """Return available events of subscription `name` for `consumer`, at most so many events and bytes (0: 1,000 and
        1 MiB). While there are none, wait for up to `wait_s` seconds.

        Returned events are in flight until they are acknowledged, or the consumer has not called for its session
        timeout. Acknowledge or reject the batches, and then give the result to `acknowledge`, or here as `after`.

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
            request.reports.extend(after.reports())
        self._pulling.add((name, consumer))
        if tracing.active is None or not tracing.active.records():
            return await self._pull(request, wait_s)
        with tracing.active.pulling(self._provider, name) as span:
            pulled = await self._pull(request, wait_s)
            span.received(pulled)
            return pulled

    async def _pull(self, request: pb.PullRequest, wait_s: float) -> Pulled:
        answer = await self._connection.call(
            "ConsumerService/Pull", request.SerializeToString(), timeout_s=self._timeout_s + wait_s
        )
        return Pulled(request.subscription, request.consumer, answer, self._provider)

    async def acknowledge(self, pulled: Pulled) -> int:
        """Report the results of batches that `pull` returned. Return 0 if none was too late.

        Otherwise return how many reports were too late: their events are delivered again, or another consumer has them.
        One report may be for many batches of a stream.
        """
        reports = _check_pulled(pulled).reports()
        request = pb.AcknowledgeRequest(
            provider=self._provider,
            subscription=pulled.name,
            consumer=pulled.consumer,
            reports=reports,
        )
        answer = await self._connection.call(
            "ConsumerService/Acknowledge", request.SerializeToString(), timeout_s=self._timeout_s
        )
        return len(parsed(pb.AcknowledgeResponse, answer).refused)

    async def close_consumers(self) -> None:
        """Close all consumers that `subscribe` opened, and let the consumers of `pull` leave."""
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


async def _opened(attached: _A, consumer: Consumer) -> _A:
    try:
        await consumer.opened()
    except BaseException:
        await attached.aclose()
        raise
    return attached


def _check_pull(max_events: int, max_bytes: int, wait_s: float, session_timeout_s: float | None) -> None:
    for name, number in (("max_events", max_events), ("max_bytes", max_bytes)):
        check_integer(name, number, 0, (1 << 32) - 1)
    check_seconds("wait_s", wait_s, most=MAX_PULL_S)
    if session_timeout_s is not None:
        check_seconds("session_timeout_s", session_timeout_s, most=MAX_PULL_S)


def _check_pulled(pulled: object) -> Pulled:
    if not isinstance(pulled, Pulled):
        raise InvalidArgument(f"acknowledge takes the result of `pull`, not {type(pulled).__name__}")
    return pulled
