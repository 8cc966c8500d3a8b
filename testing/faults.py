"""Faults that tests inject: into handlers, and into publishes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from ..adapters import ProducerSequence, QueueAdapter, Receipt
from ..adapters.forwarding import ForwardingAdapter
from ..streams.events import Event, EventBatch, ScheduledBatch
from ..streams.handlers import Handler
from .deliveries import DeliveryHistory, RecordedPublish


class HandlerFault(NamedTuple):
    """The handler fails with `error`."""

    error: Exception
    after: bool
    """Whether the handler does its work first."""


class PublishFault(NamedTuple):
    """A publish fails with `error`."""

    error: Exception
    stored: bool
    """Whether the events are stored all the same."""


class HandlerFaults:
    """Wraps handlers: records their calls, makes them slow, and lets them fail."""

    def __init__(self, history: DeliveryHistory) -> None:
        self._history = history
        self._faults: dict[str, deque[HandlerFault]] = {}
        self._delays_s: dict[str, float] = {}
        self.running = 0
        """Handlers that run now."""

    def fail(self, subscription: str, fault: HandlerFault, times: int) -> None:
        self._faults.setdefault(subscription, deque()).extend([fault] * times)

    def slow(self, subscription: str, seconds: float) -> None:
        self._delays_s[subscription] = seconds

    def watched(self, subscription: str, handler: Handler) -> Handler:
        """Return a handler that calls `handler`, with faults, and records it."""
        on_event, on_batch, on_redrive = handler.on_event, handler.on_batch, handler.on_redrive

        async def event(event: Event) -> None:
            assert on_event is not None
            await self._call(subscription, [event], partial(on_event, event))

        async def batch(batch: EventBatch) -> None:
            assert on_batch is not None
            await self._call(subscription, list(batch.events()), partial(on_batch, batch))

        async def redrive(event: Event) -> None:
            assert on_redrive is not None
            await self._call(subscription, [event], partial(on_redrive, event))

        return handler._replace(
            on_event=event if on_event else None,
            on_batch=batch if on_batch else None,
            on_redrive=redrive if on_redrive else None,
        )

    async def _call(self, subscription: str, events: Sequence[Event], call: Callable[[], Awaitable[None]]) -> None:
        self.running += 1
        try:
            with self._history.delivering(subscription, events):
                await self._with_faults(subscription, call)
        finally:
            self.running -= 1

    async def _with_faults(self, subscription: str, call: Callable[[], Awaitable[None]]) -> None:
        faults = self._faults.get(subscription)
        fault = faults.popleft() if faults else None
        if delay_s := self._delays_s.get(subscription):
            await asyncio.sleep(delay_s)
        if fault is not None and not fault.after:
            raise fault.error
        await call()
        if fault is not None:
            raise fault.error


class FaultyAdapter(ForwardingAdapter):
    """Records published events, and lets publishes fail."""

    def __init__(self, inner: QueueAdapter, history: DeliveryHistory) -> None:
        super().__init__(inner)
        self.faults: deque[PublishFault] = deque()
        self._history = history

    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        fault = self.faults.popleft() if self.faults else None
        failure = "" if fault is None else f", failed{' but stored' if fault.stored else ''}: {fault.error}"
        records = [self._records(batch, failure) for _, batch in batches]
        storing = None if fault and not fault.stored else self.inner.enqueue(batches, sequence=sequence)
        return self._enqueued(records, storing, fault)

    def _records(self, batch: EventBatch, failure: str) -> Sequence[RecordedPublish]:
        delay_us = batch.delay_us if isinstance(batch, ScheduledBatch) else 0
        delayed = f", delayed by {timedelta(microseconds=delay_us)}" if delay_us else ""
        return [self._history.publishing(batch.stream, e.payload, f"{delayed}{failure}") for e in batch.events()]

    async def _enqueued(
        self,
        records: Sequence[Sequence[RecordedPublish]],
        storing: Awaitable[Sequence[Receipt]] | None,
        fault: PublishFault | None,
    ) -> Sequence[Receipt]:
        receipts: Sequence[Receipt] = [] if storing is None else await storing
        for of_batch, receipt in zip(records, receipts, strict=False):  # none if the publish failed
            for index, record in enumerate(of_batch):
                if receipt.token is not None and "delayed" not in record.note:
                    record.token = receipt.token._replace(index=index)
        if fault is not None:
            raise fault.error
        return receipts
