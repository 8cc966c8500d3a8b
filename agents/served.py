"""Subscriptions that this process serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..balancer.held_leases import LeaseTerm
from ..streams.errors import HeadraceError
from ..streams.failure_log import FailureLog
from ..streams.handler_workers import notify_completed, notify_error
from ..streams.handlers import Handler
from ..streams.options import EventFilter
from ..streams.progress import SubscriptionAttachment
from ..streams.subscriptions import Checkpoint, GapRecord, SubscriptionDefinition
from .counts import DeliveryCounts
from .delivery.breaker import Gate
from .delivery.delivery import Delivery, FailureSink
from .delivery.handling import HandlerDelivery

log = logging.getLogger("headrace.agents")


class DeliveryService(Protocol):
    """Delivers a subscription's events: to handlers in this process, or to the members of a group."""

    @property
    def stored(self) -> bool:
        """Whether the control store keeps its progress. Otherwise its consumers do."""
        ...

    def deliver(
        self,
        definition: SubscriptionDefinition,
        queue: int,
        checkpoint: Checkpoint,
        sink: FailureSink,
        *,
        epoch: int,
        queue_epoch: int,
        generation: int,
        term: LeaseTerm | None,
        rewindable: bool,
        gate: Gate,
        counts: DeliveryCounts,
    ) -> Delivery:
        """Return a delivery of one queue's events from the checkpoint on."""
        ...

    def gap(self, record: GapRecord) -> None:
        """The queue deleted events before they were delivered."""
        ...

    def ended(self, queue: int) -> None:
        """The queue is not delivered here any more: it was given back, or its lease is lost."""
        ...

    async def fenced(self, error: HeadraceError) -> None:
        """Another process took over the subscription. It is not served here any more."""
        ...

    async def completed(self, limit_s: float) -> None:
        """The subscription was closed or deleted. It is not served here any more. Returns within `limit_s` seconds."""
        ...


HandlerWatch = Callable[[str, Handler], Handler]
"""Takes the name of a subscription and the handler of a delivery. Returns the handler to call."""


def _unwatched(_: str, handler: Handler) -> Handler:
    return handler


@dataclass(eq=False)
class HandlerService:
    """Delivers to handlers in this process."""

    handler: Handler
    predicate: EventFilter | None
    concurrency: int
    stored: bool = True
    provider: str = "default"
    """The name of the provider, for traces."""
    failures: FailureLog = field(default_factory=FailureLog)
    watch: HandlerWatch = _unwatched
    """For tests: it may return a handler that notes the calls, or fails."""

    def deliver(
        self, definition: SubscriptionDefinition, queue: int, checkpoint: Checkpoint, sink: FailureSink, **options: Any
    ) -> Delivery:
        return HandlerDelivery(
            definition, queue, checkpoint, self.watch(definition.name, self.handler), sink,
            predicate=self.predicate, concurrency=self.concurrency, provider=self.provider, failures=self.failures,
            **options,
        )  # fmt: skip

    def gap(self, record: GapRecord) -> None: ...

    def ended(self, queue: int) -> None: ...

    async def fenced(self, error: HeadraceError) -> None:
        await notify_error(self.handler, error, log)

    async def completed(self, limit_s: float) -> None:
        await notify_completed(self.handler, limit_s, log)


class ServedSubscription:
    """A subscription that this process serves."""

    def __init__(
        self, definition: SubscriptionDefinition, service: DeliveryService, attachment: SubscriptionAttachment
    ) -> None:
        self.definition = definition
        self.service = service
        self.epoch = attachment.epoch
        self.generation = attachment.generation
        self.gate = Gate(definition.name, enabled=definition.circuit_breaker)
        """The subscription's circuit breaker."""
        self._deliveries: dict[int, Delivery] = {}
        self.deliveries: Mapping[int, Delivery] = self._deliveries
        """By queue. A queue whose agent is stopped is missing."""
        self._saved = dict(attachment.checkpoints)
        self.saved: Mapping[int, Checkpoint] = self._saved
        """Stored checkpoints by queue, so that only changes are written."""

    def log_deleted(self) -> None:
        """Say that the subscription was deleted while this process served it."""
        log.info("subscription %r was deleted: it is not served any more", self.definition.name)

    def begin(self, queue: int, delivery: Delivery) -> None:
        """The queue's events are delivered from now on."""
        self._deliveries[queue] = delivery

    def end(self, queue: int) -> Delivery | None:
        """The queue's events are not delivered any more. Return the delivery, if there was one."""
        return self._deliveries.pop(queue, None)

    def note_stored(self, stored: Mapping[int, Checkpoint | None]) -> None:
        """Note stored checkpoints by queue. None: the subscription does not read the queue, or was deleted."""
        for queue, checkpoint in stored.items():
            if checkpoint is None:
                self._saved.pop(queue, None)
            else:
                self._saved[queue] = checkpoint
