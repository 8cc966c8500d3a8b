"""A provider in this process: publish, subscribe and administrate.

async with Provider.open("data") as provider:
    await provider.subscribe("printer", "orders/*", handler)
    await provider.stream("orders", "42").publish(b"paid")
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast, overload

from msgspec.structs import replace

from ..client.options import ConsumerOptions
from ..client.stream_provider import HandledSubscription, StreamProvider
from ..streams.arguments import check_ids, check_methods, check_options, check_path, check_text, one_of
from ..streams.codecs import P
from ..streams.errors import InvalidArgument, NotFound, NotSupported
from ..streams.handlers import (
    LOCAL_HANDLER_OPTIONS,
    AnyHandler,
    BatchHandler,
    BatchObserver,
    EventHandler,
    Observer,
    PayloadHandler,
    SubscriptionDeclaration,
    check_no_definition_options,
    check_no_handler_options,
)
from ..streams.identity import StreamId
from ..streams.openings import ConsumerOpening, HandlerOpening
from ..streams.options import LocalHandlerOptions
from ..streams.states import SubscriptionState
from ..streams.subscriptions import DeadLetter, GapRecord, Mode, Selector, Start, SubscriptionDefinition
from ..streams.transactions import BatchEffectHandler, EventEffectHandler, HandlerEffects, PayloadEffectHandler
from .lost_positions import forget_lost_positions
from .measured_provider import MeasuredProvider
from .opening import ProviderParts, open_parts
from .options import ProviderKeywords, ProviderOptions

if TYPE_CHECKING:
    from ..client.consumer import Consumer
    from ..client.consuming_client import ConsumingClient
    from ..client.plan import ConsumerPlan
    from ..client.pulled import Pulled
    from .consumer_groups import ConsumerGroups
    from .services.consumer import Gateways

_T = TypeVar("_T")

ANY_STREAM = "*/*"
"""Selector of a subscription before its stored definition is read."""

_CONSUMER_ONLY = ConsumerOptions.__annotations__.keys() - set(LOCAL_HANDLER_OPTIONS)


@check_methods(StreamProvider)
class Provider(MeasuredProvider):
    """One named configuration, opened in this process. Not for sharing between event loops."""

    def __init__(self, parts: ProviderParts) -> None:
        super().__init__(parts)
        self._consumers: ConsumerGroups | None = None
        """The groups of remote consumers, while a silo serves them."""
        self._gateways: Gateways | None = None
        """While a silo of a cluster serves remote consumers: it makes this silo the gateway of consumers here."""
        self._local_consumer: ConsumingClient | None = None
        self._stack = AsyncExitStack()

    @classmethod
    def open(
        cls, data: str | os.PathLike[str] | None = None, **options: Unpack[ProviderKeywords]
    ) -> AbstractAsyncContextManager[Provider]:
        """Open a provider for the length of an `async with`. `options` are those of `ProviderOptions`.

        `data` is the data directory; without one, progress is kept in memory and the adapter must not need a directory.

        Raises InvalidArgument for an unknown option or a wrong type; when entered, DataDirectoryError, NotFound for an
        unknown adapter, InvalidArgument for options that do not fit the provider's first ones.
        """
        if data is not None:
            check_path("data", data, optional=True)
        check_options("Provider.open", options, ProviderKeywords.__annotations__)
        return cls._opened(data, ProviderOptions(**options))

    @classmethod
    @asynccontextmanager
    async def _opened(cls, data: str | os.PathLike[str] | None, options: ProviderOptions) -> AsyncGenerator[Provider]:
        provider = await cls.start(data, options)
        try:
            yield provider
        finally:
            await provider.aclose()

    @classmethod
    async def start(
        cls,
        data: str | os.PathLike[str] | None,
        options: ProviderOptions,
        *,
        control: str | None = None,
        leased: bool = False,
        create: bool = True,
    ) -> Provider:
        """Open a provider; the caller closes it with `aclose`.

        `control` is the URL of the database with the control data; None: it is in the data directory. `leased`: the
        provider belongs to a silo in a cluster, and serves the queues of which the silo has leases. Unless `create`,
        raise NotFound if the control store does not know the provider.
        """
        parts = await open_parts(data, options, control=control, leased=leased, create=create)
        try:
            provider = cls(parts)
            await forget_lost_positions(provider)
            if options.outbox is not None:
                await provider.open_outbox(options.outbox)
        except BaseException:
            await parts.aclose()
            raise
        provider.begin()
        return provider

    async def _close(self, drain_s: float) -> None:
        await self._stack.aclose()
        await super()._close(drain_s)

    # ---- subscribing -----------------------------------------------------------------------------------------------

    @overload
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None,
        handler: EventHandler | PayloadHandler[P] | Observer | BatchObserver,
        *,
        batch: Literal[False] = False,
        **options: Unpack[LocalHandlerOptions],
    ) -> Coroutine[Any, Any, LocalSubscription]: ...
    @overload
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None,
        handler: BatchHandler | BatchObserver,
        *,
        batch: Literal[True],
        **options: Unpack[LocalHandlerOptions],
    ) -> Coroutine[Any, Any, LocalSubscription]: ...
    @overload
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None,
        handler: EventEffectHandler[_T] | PayloadEffectHandler[P, _T],
        *,
        batch: Literal[False] = False,
        effects: HandlerEffects[_T],
        **options: Unpack[LocalHandlerOptions],
    ) -> Coroutine[Any, Any, LocalSubscription]: ...
    @overload
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None,
        handler: BatchEffectHandler[_T],
        *,
        batch: Literal[True],
        effects: HandlerEffects[_T],
        **options: Unpack[LocalHandlerOptions],
    ) -> Coroutine[Any, Any, LocalSubscription]: ...
    @overload
    def subscribe(
        self,
        name: str,
        selector: str | StreamId | None = None,
        handler: None = None,
        **options: Unpack[ConsumerOptions],
    ) -> ConsumerOpening[Consumer]: ...
    def subscribe(
        self, name: str, selector: str | StreamId | None = None, handler: AnyHandler | None = None, **options: Any
    ) -> Coroutine[Any, Any, LocalSubscription] | ConsumerOpening[Consumer]:
        """Consume the durable subscription `name`, which is created if it does not exist.

        With `handler`, await the result: `await provider.subscribe(..., handler)`. Without one, enter it, and take
        batches: `async with provider.subscribe(...) as consumer: async for batch in consumer`. Every event published
        afterwards is delivered.

        If another process with the same data directory serves the subscription, this one stands by, and takes over when
        that process ends. The call does not wait for that. It stands by also while `close()` or `delete()` of the
        former subscription in this process waits for its handlers; with the adapter `memory` it raises Busy then.

        `handler` is an async function of an Event, with `batch=True` of an EventBatch, or an observer object (see
        `headrace.streams.handlers`). `selector` is `namespace/key`, with `*` for any text. Without `selector` the
        subscription must exist. `start` may be text, as in `Start.parse`. Options with a handler: `batch`, `filter`,
        `effects` (the handler takes a transaction, too; see docs/effects.md), `concurrency` (how many handlers run at a
        time, per queue), `start`, `retry`, `on_failure`, `slow_consumer`, `circuit_breaker`. Options without one are
        those of `Client.subscribe` without one.

        Raises InvalidArgument at once for wrong arguments; when awaited or entered, DefinitionConflict if `name` exists
        with another definition, NotFound, also if the database of `effects` lacks their tables, Busy if this process
        consumes it already, NotSupported for options that the adapter does not support.
        """
        if handler is None:
            plan = self._plan(name, selector, options)
            return ConsumerOpening(partial(_open_consumer, self, plan), "provider", name)
        if of_consumer := [option for option in options if option in _CONSUMER_ONLY]:
            raise InvalidArgument(
                f"subscription {name!r}: {', '.join(of_consumer)} is for a consumer without a handler; with one, "
                f"use {one_of(sorted(LOCAL_HANDLER_OPTIONS))}"
            )
        check_options("provider.subscribe", options, LOCAL_HANDLER_OPTIONS)
        if selector is None:
            check_no_definition_options(name, options)
        declared = SubscriptionDeclaration.of(
            self.name, name, ANY_STREAM if selector is None else selector, handler, options
        )
        declared.check_handler()
        attaching = self._attach_existing(declared) if selector is None else self.attach(declared)
        return HandlerOpening(cast("Any", attaching), "provider", name)

    async def _attach_existing(self, declared: SubscriptionDeclaration) -> LocalSubscription:
        stored = await self.store.subscription(self.name, declared.definition.name)
        definition = replace(stored, filter=declared.definition.filter)
        return await self.attach(declared._replace(definition=definition))

    def _plan(self, name: str, selector: str | StreamId | None, options: Mapping[str, Any]) -> ConsumerPlan:
        from ..client.plan import plan_of  # noqa: PLC0415 (it loads gRPC's client)

        check_no_handler_options(name, options)
        return plan_of("provider.subscribe", name, None if selector is None else Selector.of(selector), options)

    async def local_consumer(self) -> ConsumingClient:
        """The client's side of consuming, connected to the services in this process. Made at the first call."""
        if self._local_consumer is None:
            from .local import consuming  # noqa: PLC0415 (it loads gRPC's client and services)

            opening = consuming(self, self._consumers, self._gateways)
            self._local_consumer = await self._stack.enter_async_context(opening)
        return self._local_consumer

    @contextmanager
    def serving_consumers(self, consumers: ConsumerGroups, gateways: Gateways | None) -> Generator[None]:
        """Let consumers of this process join the groups of remote consumers for the length of a `with`. With
        `gateways`, they get events from the queues of other silos, too."""
        self._consumers, self._gateways = consumers, gateways
        try:
            yield
        finally:
            self._consumers = self._gateways = None

    async def attach(self, declared: SubscriptionDeclaration, *, stands_by: bool = True) -> LocalSubscription:
        """`subscribe` with everything in one value, as the `@subscription` decorator makes it. Unless `stands_by`,
        raise Busy if another process serves it."""
        if declared.definition.mode is not Mode.SHARED:
            raise NotSupported(
                f"subscription {declared.definition.name!r}: a handler in the silo is all of its group, so its mode is "
                f"shared, not {declared.definition.mode.value}; consume it through a client instead"
            )
        if declared.effects is not None and len(self.queues_with(_SOME_STREAM)) > 1:
            raise NotSupported(
                f"subscription {declared.definition.name!r}: effects need one queue for each stream, and any queue of "
                f"provider {self.name!r} may have events of a stream; say in the option "
                "`partitioner` how its producers choose the queue"
            )
        service = await self.make_service(declared)
        await self.serve(declared.definition, service, stands_by=stands_by)
        return LocalSubscription(self, declared)

    async def caught_up(self, name: str) -> None:
        """Return when subscription `name` has finished all events stored before the call (except in paused streams),
        whichever process serves it.

        If the adapter keeps no order: when no due events are left. Raises NotFound.
        """
        if check_text("name", name) in self.manager.served and not self.leased:
            await self.wait_until_caught_up(name)
        else:
            await (await self.local_consumer()).caught_up(name)

    # ---- as a client does it ----------------------------------------------------------------------------------------

    async def subscription(self, name: str) -> SubscriptionState:
        """Return a subscription with its progress. Raise NotFound."""
        return await (await self.local_consumer()).subscription(name)

    async def subscriptions(self) -> list[SubscriptionDefinition]:
        """All subscriptions, by name."""
        return await (await self.local_consumer()).subscriptions()

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
        """Take the next batches of subscription `name` for `consumer`, without attaching. See `Client.pull`."""
        return await (await self.local_consumer()).pull(
            name,
            consumer,
            max_events=max_events,
            max_bytes=max_bytes,
            wait_s=wait_s,
            session_timeout_s=session_timeout_s,
            after=after,
        )

    async def acknowledge(self, pulled: Pulled) -> int:
        """Save the acknowledgements and rejections of pulled batches. Return 0 if none was too late: see
        `Client.acknowledge`."""
        return await (await self.local_consumer()).acknowledge(pulled)

    async def dead_letters(
        self, subscription: str | None = None, *, limit: int = 100, after_id: int = 0
    ) -> list[DeadLetter]:
        """The first `limit` dead letters with an id above `after_id`, by id; of one subscription, or of all."""
        return await (await self.local_consumer()).dead_letters(subscription, limit=limit, after_id=after_id)

    async def redrive(self, subscription: str, ids: Sequence[int] | None = None) -> int:
        """Deliver dead letters (all, or those with `ids`) once more, outside of the order of their
        streams. Return the number of requested redrives. An event that fails again stays a dead letter, with its new
        reason. Raises NotFound."""
        return await (await self.local_consumer()).redrive(subscription, ids)

    async def delete_dead_letters(self, subscription: str, ids: Sequence[int] | None = None) -> int:
        """Delete dead letters (all, or those with `ids`), also of a deleted subscription. Return how many."""
        return await (await self.local_consumer()).delete_dead_letters(subscription, ids)

    async def gaps(self, subscription: str) -> list[GapRecord]:
        """Return the gap records of a subscription, in the order of detection: events that it does not get. Raise
        NotFound."""
        return await (await self.local_consumer()).gaps(subscription)


_SOME_STREAM = StreamId("namespace", "key")


async def _open_consumer(provider: Provider, plan: ConsumerPlan) -> Consumer:
    return await (await provider.local_consumer()).open_consumer(plan)


@check_methods(HandledSubscription)
class LocalSubscription:
    """A subscription that this process serves, or for which it stands by."""

    def __init__(self, provider: Provider, declared: SubscriptionDeclaration) -> None:
        self.name = declared.definition.name
        self.definition = declared.definition
        self._provider = provider

    async def caught_up(self) -> None:
        """Return when everything stored before the call is done (except in paused streams), in whichever process
        serves it. Raises NotFound if it was closed."""
        if self.stands_by:
            await self._provider.caught_up(self.name)
        else:
            await self._provider.wait_until_caught_up(self.name)

    @property
    def stands_by(self) -> bool:
        """Whether another process serves it now, so that this process only waits to take over."""
        return self.name in self._provider.standby.waiting

    async def seek(self, start: Start | str) -> int:
        """Move to another position, also an earlier one. Return the number of consumers that were not moved: 0, because
        a handler keeps no positions itself."""
        return await self._provider.seek(self.name, start)

    async def close(self) -> None:
        """Stop serving it in this process. It stays durable: later events are kept, and it resumes at its position.
        Idempotent.

        Raises InvalidArgument in its own handler, because the call waits for the handler's end.
        """
        with suppress(NotFound):  # it is closed or deleted already
            await self._provider.withdraw(self.name)

    async def delete(self) -> None:
        """Stop serving it and forget its progress."""
        await self._provider.delete_subscription(self.name)

    async def resume(self, stream: StreamId) -> bool:
        """Continue a paused stream. Return False if it is not paused."""
        return await self._provider.resume(self.name, stream)

    async def redrive(self, ids: Sequence[int] | None = None) -> int:
        """Deliver dead letters (all, or those with `ids`) once more, outside of the order of their
        streams. Return the number of requested redrives. An event that fails again stays a dead letter, with its new
        reason."""
        return await self._provider.store.request_redrive(self._provider.name, self.name, check_ids("ids", ids))
