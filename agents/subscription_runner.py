"""The subscriptions of one provider that this process serves: they begin, move, end, and are taken over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakValueDictionary

from ..streams.errors import Busy, Fenced, HeadraceError, InvalidArgument, NotFound, Unavailable
from ..streams.progress import SubscriptionAttachment
from ..streams.subscriptions import Checkpoint, SubscriptionDefinition, parent_name, redefined
from .checkpointer import Checkpointer
from .host_state import HostState
from .progress_store import ProgressStore
from .served import DeliveryService, ServedSubscription

log = logging.getLogger("headrace.agents")

RETRY_S = 1.0
"""Wait before the store is asked again about a subscription that was moved, in seconds."""


class SubscriptionRunner:
    """Serves subscriptions, and stops serving them."""

    def __init__(self, state: HostState, store: ProgressStore, checkpointer: Checkpointer) -> None:
        self.on_fenced: Callable[[str], None] = lambda _: None
        """Called with the name of a subscription that stopped without `withdraw`, once its deliveries have ended."""
        self.may_serve: Callable[[str], Awaitable[bool]] = self._is_in_cluster
        """Whether this process may go on with a subscription that another process moved: no other one serves it."""
        self._state = state
        self._store = store
        self._checkpointer = checkpointer
        self.paused: Mapping[str, ServedSubscription] = state.paused
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        """By subscription. A lock lives while a task holds it or waits for it."""

    async def serve(
        self,
        definition: SubscriptionDefinition,
        service: DeliveryService,
        start: Mapping[int, Checkpoint] | None = None,
    ) -> None:
        """Deliver a subscription of the store from its checkpoints on, or one that is not stored from `start` on.
        Raises Busy if it is served here already, NotFound if it does not exist, Fenced if it was deleted and created
        again with another definition."""
        self._check_unserved(definition.name)
        async with self._state.changing:  # a queue that is gained meanwhile reads its checkpoints after this
            if service.stored:
                attachment = await self._attachment(definition.name)
                if attachment.definition not in (None, definition):
                    raise redefined(definition.name)
            else:
                attachment = SubscriptionAttachment(0, start or {})
            self._check_unserved(definition.name)
            self._deliver(definition, service, attachment)

    async def _attachment(self, name: str) -> SubscriptionAttachment:
        return await self._store.attach(self._state.provider, name, exclusive=self._state.leases is None)

    def _check_unserved(self, name: str) -> None:
        if name in self._state.served or name in self.paused:
            raise Busy(f"subscription {parent_name(name)!r} is already served by this process")

    def _deliver(
        self, definition: SubscriptionDefinition, service: DeliveryService, attachment: SubscriptionAttachment
    ) -> None:
        self._state.serve(ServedSubscription(definition, service, attachment))

    async def move(self, name: str, positions: Mapping[int, Checkpoint], reason: str, drain_s: float) -> None:
        """Go on from other positions. If the store fails, raise its error, and go on from the former ones.

        A caller that is cancelled ends the subscription: run this in a task. Raises NotFound if it is not served here.
        """
        async with self._paused(name) as served:
            leases = self._state.leases_now()
            here = await self._detach(served, drain_s)
            try:
                attachment = await self._moved(name, positions, reason)
            except BaseException:
                self._deliver(served.definition, served.service, _former(served, here, leases, self._state.leases))
                raise
            self._deliver(served.definition, served.service, attachment)

    async def _moved(self, name: str, positions: Mapping[int, Checkpoint], reason: str) -> SubscriptionAttachment:
        """Store the positions, and return from where the subscription goes on."""
        async with self._checkpointer.lock:
            await self._store.seek(self._state.provider, name, positions, reason)
            return await self._attachment(name)

    async def restart(self, name: str, positions: Mapping[int, Checkpoint]) -> None:
        """Go on from earlier positions, as after a crash that lost all later progress. Running handlers are cancelled.
        In contrast to `move`, the generation stays. For tests. Raises NotFound if it is not served here."""
        async with self._paused(name) as served:
            await self._detach(served, 0.0)
            attachment = await self._attachment(name)
            checkpoints = {**attachment.checkpoints, **positions}
            self._deliver(served.definition, served.service, attachment._replace(checkpoints=checkpoints))

    async def withdraw(self, name: str, drain_s: float) -> ServedSubscription:
        """Stop serving: running handlers have `drain_s` seconds to end, then exactly the progress made is stored.
        Raises NotFound if it is not served here."""
        async with self._exclusive(name) as served:
            self._state.remove(name)
            leases = self._state.leases_now()
            final = await self._detach(served, drain_s)
            await self._checkpointer.save_withdrawn(served, final, leases)
            return served

    async def settled(self, name: str) -> ServedSubscription:
        """Return a subscription after the calls that move or close it now. Raises NotFound if it is not served here."""
        async with self._exclusive(name) as served:
            return served

    @asynccontextmanager
    async def _exclusive(self, name: str) -> AsyncGenerator[ServedSubscription]:
        """Keep the other calls that move or close the subscription out for the length of an `async with`, and queues
        from being given back. Raises NotFound if it is not served here."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            await self._agents_settled()
            change = asyncio.get_running_loop().create_future()
            self._state.changes.add(change)
            try:
                yield self.serving(name)
            finally:
                self._state.changes.discard(change)
                change.set_result(None)

    @asynccontextmanager
    async def _paused(self, name: str) -> AsyncGenerator[ServedSubscription]:
        """As `_exclusive`. Serve the subscription no more, and let no other service take its place meanwhile."""
        async with self._exclusive(name) as served:
            with self._stopped(served):
                yield served

    @contextmanager
    def _stopped(self, served: ServedSubscription) -> Generator[None]:
        """Serve a subscription no more, and let no other service take its place for the length of a `with`."""
        self._state.pause(served)
        try:
            yield
        finally:
            if self._is_paused(served):
                self._state.end_pause(served.definition.name)

    def _is_paused(self, served: ServedSubscription) -> bool:
        """Whether it may go on. It may not if it was given up meanwhile."""
        return self.paused.get(served.definition.name) is served

    def give_up(self, name: str) -> None:
        """Do not go on with a subscription that is stopped at the moment, because it was closed or deleted. `on_fenced`
        is called when it has stopped. Nothing is done if it is not stopped."""
        self._state.end_pause(name)

    async def _detach(self, served: ServedSubscription, drain_s: float) -> dict[int, Checkpoint]:
        """Stop all its deliveries. Return exactly the progress made."""
        name, queues = served.definition.name, list(served.deliveries)
        done = await asyncio.gather(*(self._state.agents[queue].detach(name, drain_s) for queue in queues))
        return {queue: cp for queue, cp in zip(queues, done, strict=True) if cp is not None}

    async def _agents_settled(self) -> None:
        async with self._state.changing:
            pass

    def serving(self, name: str) -> ServedSubscription:
        """Raises NotFound if it is not served here."""
        if name not in self._state.served:
            raise NotFound(f"subscription {name!r} is not served by this process")
        return self._state.served[name]

    def check_outside(self, name: str) -> None:
        """Raise InvalidArgument if a handler of the subscription is the caller: stopping would wait for it."""
        served = self._state.served.get(name) or self.paused.get(name)
        if served is not None and any(delivery.runs_here() for delivery in served.deliveries.values()):
            raise InvalidArgument(
                f"a handler of subscription {name!r} cannot wait until the subscription is closed, moved or deleted: "
                "that waits for the handler; do it in a task of its own"
            )

    # ---- another process moved, deleted or took over a subscription ------------------------------------------------

    async def _is_in_cluster(self, _name: str) -> bool:
        return self._state.leases is not None

    def stop_fenced(self, name: str) -> None:
        """Stop a subscription that another process changed, in a task: the other subscriptions do not wait for it."""
        self._state.background.start(self._stop_fenced(name), f"headrace fenced {name}")

    async def _stop_fenced(self, name: str) -> None:
        """Stop. Progress that is still made here is refused anyway. Go on from the new position, if this process may:
        in a cluster, and if no other process can have taken over."""
        served = self._state.served.get(name)
        if served is None:
            return
        goes_on = is_closed = False
        try:
            with self._stopped(served):  # consumers that come meanwhile join the others
                await self._detach(served, 0.0)
                for queue in served.deliveries:
                    # Progress may be lost: consumers report all acknowledgements again that are not confirmed.
                    served.service.ended(queue)
                if not await self.may_serve(name):
                    log.error(
                        "subscription %r was moved, deleted or taken over elsewhere: this process stops serving it",
                        name,
                    )
                else:
                    goes_on = await self._attached_again(served)
                is_closed = not goes_on and not self._is_paused(served)
        finally:
            if not goes_on:
                self.on_fenced(name)
        if not goes_on and not is_closed:
            shown = parent_name(name)
            await served.service.fenced(Fenced(f"subscription {shown!r} was moved, deleted or taken over elsewhere"))

    async def end_for_positions(self, name: str) -> None:
        """Stop a subscription: the silo gained a queue, and only the consumer knows its position there. The consumer
        must connect again, with that position."""
        served = self.serving(name)
        try:
            with self._stopped(served):
                await self._detach(served, 0.0)
        finally:
            self.on_fenced(name)
        shown = parent_name(name)
        await served.service.fenced(Unavailable(f"the silo of subscription {shown!r} has another queue: connect again"))

    async def _attached_again(self, served: ServedSubscription) -> bool:
        """Attach again, and go on from the stored position: another process may have moved the subscription. Return
        False if it was deleted, closed or taken over. While the store fails, try again."""
        name = served.definition.name
        while True:
            try:
                return await self._attach_again(served)
            except HeadraceError as error:
                log.warning("subscription %r was moved, and waits for the control store: %s", name, error)
            await asyncio.sleep(RETRY_S)

    async def _attach_again(self, served: ServedSubscription) -> bool:
        name = served.definition.name
        async with self._state.changing:
            if not self._is_paused(served):  # it was closed
                return False
            try:
                attachment = await self._attachment(name)
            except NotFound:
                attachment = None
            if attachment is None or attachment.definition not in (None, served.definition):
                served.log_deleted()
                return False
            if not await self.may_serve(name) or not self._is_paused(served):  # it was closed meanwhile
                return False
            log.info("subscription %r was moved: going on from where it is now", name)
            self._deliver(served.definition, served.service, attachment)
        return True


def _former(
    served: ServedSubscription,
    here: Mapping[int, Checkpoint],
    before: Mapping[int, int] | None,
    now: Mapping[int, int] | None,
) -> SubscriptionAttachment:
    """Return from where a subscription goes on if it could not be moved. `before` and `now` are the leases before and
    after. The progress made here does not count in queues that another process may have had between."""
    if before is not None and now is not None:
        here = {queue: each for queue, each in here.items() if before.get(queue) == now.get(queue)}
    return SubscriptionAttachment(served.epoch, {**served.saved, **here}, served.generation)
