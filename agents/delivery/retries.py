"""Retries: an event that failed is delivered again later, or given up on."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ...streams.events import EventBatch
from ...streams.failure_log import FailureLog
from ...streams.identity import StreamId
from ...streams.subscriptions import OnFailure
from ...streams.wording import shortened
from ..cursor import StreamCursor
from .breaker import HELD

if TYPE_CHECKING:
    from .delivery import Delivery, FailureSink

log = logging.getLogger("headrace.agents")

STORE_RETRY_S = 1.0
EXCUSED_S = 1.0
"""The shortest wait after a failure that does not count, in seconds. The number of such failures is not limited."""

RNG = random.Random()  # noqa: S311 (jitter)
"""One generator for all deliveries: each takes 2.5 kB, and a subscription has a delivery for each queue."""


class Failure(NamedTuple):
    """A failed delivery of the events from the cursor's position up to index `end`, exclusive."""

    end: int
    reason: str
    error: BaseException | None = None
    """The exception of a handler."""
    delay_s: float | None = None
    """When the consumer wants the events again, in seconds. None: the retry policy decides."""
    unavailable: bool = False
    """The consumer blames a dependency, not the event: the failure never counts against the event."""
    invalid: bool = False
    """The payload cannot be decoded, so another attempt would fail, too."""


class WaitingAttempt(NamedTuple):
    """The next attempt of a cursor, and the failure of the last one."""

    timer: asyncio.TimerHandle
    reason: str


class Retries:
    """Decides about the failures of one delivery (another attempt, or giving up), and carries the decisions out."""

    def __init__(self, delivery: Delivery, sink: FailureSink, rng: random.Random | None = None) -> None:
        self._delivery = delivery
        self._definition = delivery.definition
        self._gate = delivery.gate
        self._counts = delivery.counts
        self._progress = delivery.progress
        self._sink = sink
        self._rng = rng or RNG
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[StreamCursor, WaitingAttempt] = {}
        self.waiting: Mapping[StreamCursor, WaitingAttempt] = self._waiting
        """The next attempts of waiting cursors."""
        self._unrecorded = FailureLog()
        self._stopped = False

    async def failed(self, cursor: StreamCursor, batch: EventBatch, failure: Failure) -> None:
        """Schedule another attempt, or give up."""
        if not self.try_again(cursor, failure):
            await self.give_up(cursor, batch, failure)

    def stop(self) -> None:
        """Cancel all waiting attempts, and schedule no more."""
        self._stopped = True
        for attempt in self._waiting.values():
            attempt.timer.cancel()
        self._waiting.clear()

    # ---- another attempt -------------------------------------------------------------------------------------------

    def try_again(self, cursor: StreamCursor, failure: Failure) -> bool:
        """Schedule the cursor's next attempt. Count the failed one if the circuit breaker says so. Return False if the
        retries are exhausted, or the event is invalid."""
        now, earlier = self._loop.time(), cursor.failures.phase
        failures = self._progress.fail(cursor, self._gate.breaker.phase, unavailable=failure.unavailable)
        if failure.invalid:
            self._gate.ended()
            self._progress.count_failure(cursor, now)
            return False
        delay = self._definition.retry.delay(failures.attempts + 1, now - failures.since(now), self._rng)
        if not self._gate.failed(cursor.stream, failure, earlier=earlier, exhausted=delay is None):
            self._excuse(cursor, failure)
            return True
        attempts = self._progress.count_failure(cursor, now)
        if delay is None:
            return False
        delay = delay if failure.delay_s is None else failure.delay_s
        self._counts.retries += 1
        self._delivery.log_failure(cursor, failure, f"attempt {attempts}, again in {delay:.2f} s")
        self._wait(cursor, delay, failure.reason)
        return True

    def _excuse(self, cursor: StreamCursor, failure: Failure) -> None:
        """Try again, without counting the failure. While the subscription is held, the stream joins the end of the
        ready ones, and the gate decides when it is tried. Otherwise it waits as after a failure that counts."""
        failures = self._progress.excuse_failure(cursor)
        self._counts.retries += 1
        self._counts.retries_unavailable += failure.unavailable
        self._counts.retries_held += not failure.unavailable
        self._delivery.log_failure(cursor, failure, "not counted")
        if self._gate.breaker.state is not HELD or self._stopped:
            delay_s = failure.delay_s
            if delay_s is None:
                delay_s = self._definition.retry.backoff(failures.attempts + failures.excused, self._rng)
            self._wait(cursor, max(delay_s, EXCUSED_S), failure.reason)
        else:
            self._resume(cursor)

    def _wait(self, cursor: StreamCursor, delay: float, reason: str) -> None:
        self._progress.wait(cursor)
        if not self._stopped:
            timer = self._loop.call_later(delay, self._retry, cursor)
            self._waiting[cursor] = WaitingAttempt(timer, shortened(reason))

    def _retry(self, cursor: StreamCursor) -> None:
        del self._waiting[cursor]
        self._resume(cursor)

    def _resume(self, cursor: StreamCursor) -> None:
        self._progress.resume(cursor)
        self._delivery.wake()

    # ---- giving up -------------------------------------------------------------------------------------------------

    async def give_up(self, cursor: StreamCursor, batch: EventBatch, failure: Failure) -> None:
        """Give up on the events that failed, as the subscription says. If that cannot be recorded, try again later."""
        token, attempts = cursor.token, cursor.failures.attempts
        try:
            await self._apply_on_failure(cursor, batch, failure)
        except (Exception, asyncio.CancelledError) as problem:
            if self._stopped and isinstance(problem, asyncio.CancelledError):
                raise
            message = (
                f"cannot record that subscription {self._definition.name!r} gave up on event {token} of stream "
                f"{cursor.stream} ({failure.reason}): {problem!r}; trying again"
            )
            self._unrecorded.write(log, self._loop.time(), message, None, first=True)
            self._wait(cursor, STORE_RETRY_S, f"cannot record that it was given up: {problem!r}")
        else:
            log.warning(
                "subscription %r gives up on event %s of stream %s after %d attempts: %s: %s",
                self._definition.name, token, cursor.stream, attempts,
                self._definition.on_failure.value, failure.reason, exc_info=failure.error,
            )  # fmt: skip
            await self._delivery.gave_up(failure)

    async def _apply_on_failure(self, cursor: StreamCursor, batch: EventBatch, failure: Failure) -> None:
        if self._definition.on_failure is OnFailure.PAUSE:
            self.pause(cursor, failure.reason)
            return
        left = [e for i, e in enumerate(batch.events()) if cursor.index <= i < failure.end and not cursor.is_done(i)]
        events = [event for event in left if self._delivery.is_wanted(event)]
        if self._definition.on_failure is OnFailure.DEAD_LETTER:
            await self._sink.dead_letter(self._delivery, events, failure.reason, cursor.failures.attempts)
            self._counts.dead_lettered += len(events)
        else:
            await self._sink.skipped(self._delivery, events, failure.reason)
            self._counts.skipped += len(events)
        self._counts.filtered += len(left) - len(events)
        self._progress.pass_over(cursor, failure.end)
        self._delivery.wake()
        self._delivery.waiters.notify()

    def pause(self, cursor: StreamCursor, reason: str) -> None:
        """Deliver nothing more of a stream until `resume`."""
        log.warning(
            "subscription %r pauses stream %s at event %s: %s",
            self._definition.name,
            cursor.stream,
            cursor.token,
            reason,
        )
        self._progress.pause(cursor, shortened(reason))

    def resume(self, stream: StreamId) -> bool:
        """Go on with a paused stream. Return False if it is not paused here."""
        if not self._progress.unpause(stream):
            return False
        self._delivery.wake()
        return True
