"""The circuit breaker of a subscription: it tells an outage of the consumer's dependencies from poison events.

One poison event fails again and again while other streams go on. In an outage, deliveries fail whatever their stream.
`CircuitBreaker` decides; it has no clock, no I/O and no randomness. `Gate` is the edge: one for each subscription in a
process, shared by its deliveries of all queues, with the timer that wakes them.

    closed ── failures spread over many streams ──► held ── a delivery succeeds ──► resuming ── no more limit ──► closed
                                                     ▲                                  │
                                                     └── failures spread again ─────────┘

- *closed*: no limit. The evidence is the number of streams that fail, and of those that succeed. Only the first failure
  of an event is evidence, a failed retry is not. So poison events that a burst leaves do not look like an outage.
- A *known* event failed before the subscription last resumed. If it fails again, it holds the subscription again only
  if as many streams fail as have succeeded since the breaker was last closed. So poison events that are left after an
  outage use up their attempts, even if there is no other event left that could succeed.
- *held*: only probes may begin, that is, deliveries of single events. They come after pauses of 1 s at first, which
  double up to 10 s (the half-open state of other breakers). No failure counts.
- *resuming*: in step n, of at least one second, 10 x 2^n deliveries may begin (slow start). Nothing is given up on.
  The first step that does not use its limit is the last.

Attempts that failed before a hold do not count after it. If no delivery succeeds any more, poison cannot be told from
an outage, and the subscription stays held. Silos do not coordinate: each sees the failures of all its queues, and
probes for itself.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from itertools import islice
from typing import Protocol

from ...streams.clock import now_us
from ...streams.identity import StreamId
from ...streams.states import SubscriptionHold
from ...streams.wording import shortened

log = logging.getLogger("headrace.agents")

STREAMS = 5
"""Streams that have to fail before a subscription is held."""
CALM = 20
"""Failures are forgotten after so many streams have succeeded, and three more for each stream that fails."""
MAX_RECOVERED = 10_000
SETTLE_S = 1.0
"""Failures must go on for so long to hold a subscription, in seconds, unless an event would be given up on earlier."""
FIRST_PROBE_S, MAX_PROBE_S = 1.0, 10.0
FIRST_STEP = 10
STEP_S, MAX_STEP_S = 1.0, 30.0
"""The length of a step of resuming, in seconds. It is extended up to `MAX_STEP_S` while less than half of its
deliveries have ended."""

LATE_S = 0.001
"""Timers are set this much later: a timer may be early by the resolution of the clock, in seconds."""


class BreakerState(enum.Enum):
    CLOSED = "closed"
    HELD = "held"
    RESUMING = "resuming"


class Admission(enum.Enum):
    """Whether a delivery may begin."""

    ANY = "any"
    PROBE = "probe"
    """One event."""
    NONE = "none"


CLOSED, HELD, RESUMING = BreakerState.CLOSED, BreakerState.HELD, BreakerState.RESUMING


class GatedDelivery(Protocol):
    """A delivery, as its gate sees it."""

    withheld: bool
    """Whether the gate stops new attempts at present."""

    def wake(self) -> None:
        """The gate may allow new attempts."""
        ...


class FailedAttempt(Protocol):
    """A failure of a delivery, as its gate sees it."""

    @property
    def reason(self) -> str: ...

    @property
    def error(self) -> BaseException | None: ...

    @property
    def unavailable(self) -> bool:
        """Whether the consumer blames a dependency, not the event."""
        ...


class CircuitBreaker:
    """Outcomes in, verdicts out. All times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.state = CLOSED
        self.limiting = False
        """Whether `admission` may return anything but ANY. False while the breaker is closed."""
        self.watching = False
        """Whether `succeeded` has to be called: there was a failure not long ago."""
        self.phase = 0
        """The number of holds and resumptions so far. Attempts that were counted under a lower number are void."""
        self.reason = ""
        """The failure that caused the last hold."""
        self.due = 0.0
        """When the next probe is due, or the present step ends."""
        self._failing: set[StreamId] = set()
        """Streams whose latest outcome is a failure that is evidence."""
        self._failing_anew: set[StreamId] = set()
        """Those of them whose event is not a known one."""
        self._fine: set[StreamId] = set()
        """Streams whose latest outcome since the first remembered failure is a success."""
        self._recovered: set[StreamId] = set()
        """Streams that have succeeded since the breaker was last closed, at most `MAX_RECOVERED`."""
        self._untried: set[StreamId] = set()
        """Streams that failed before it last resumed, and have had no outcome since."""
        self._calm_phase = 0
        """An event whose latest failure was before this phase is no evidence."""
        self._in_a_row: set[StreamId] = set()
        """Streams of which an event failed for the first time since the last success."""
        self._watching_since = 0.0
        self._interval = FIRST_PROBE_S
        self._limit = self._begun = self._ended = 0
        self._step_began = 0.0
        self._refused = False

    # ---- outcomes --------------------------------------------------------------------------------------------------

    def ended(self) -> None:
        """A delivery ended without saying anything about the consumer's dependencies: its event is invalid."""
        self._ended += 1

    def succeeded(self, now: float, stream: StreamId) -> None:
        """A delivery succeeded. Without effect while it is not watching."""
        if not self.watching:
            return
        self._ended += 1
        if self.state is HELD:
            self._resume(now)
        self._failing.discard(stream)
        self._failing_anew.discard(stream)
        self._untried.discard(stream)
        self._in_a_row.clear()
        self._fine.add(stream)
        if len(self._recovered) < MAX_RECOVERED:
            self._recovered.add(stream)
        if len(self._fine) >= CALM + 3 * (len(self._failing) + len(self._untried)):
            self._calm()

    def failed(
        self,
        now: float,
        stream: StreamId,
        reason: str,
        *,
        earlier: int | None,
        exhausted: bool,
        unavailable: bool = False,
    ) -> bool:
        """A delivery failed. Return whether that counts against its event.

        `earlier` is the phase in which the event failed before, None if this is its first failure. `exhausted` says
        that the event is given up on if the failure counts, `unavailable` that the consumer itself blames a dependency.
        """
        self._ended += 1
        if self.state is HELD:
            self._untried.add(stream)
            return False
        if not self.watching:
            self.watching, self._watching_since = True, now
        if earlier is None:
            self._in_a_row.add(stream)
            self._failing_anew.add(stream)
        if earlier is None or self._calm_phase <= earlier < self.phase:
            self._fine.discard(stream)
            self._untried.discard(stream)
            self._failing.add(stream)
        resuming = self.state is RESUMING
        settled = resuming or now - self._watching_since >= SETTLE_S or (exhausted and not unavailable)
        if settled and self._spread(1 if unavailable else STREAMS):
            self._hold(now, reason)
            return False
        return not unavailable and not (exhausted and resuming)

    def _spread(self, least: int) -> bool:
        """Whether at least `least` streams fail and they are at least half of all, or at least `least` streams failed
        since the last success."""
        anew, failing = len(self._failing_anew), len(self._failing)
        if (anew >= least and anew >= len(self._fine)) or (failing >= least and failing >= len(self._recovered)):
            return True
        return self.state is CLOSED and len(self._in_a_row) >= least

    # ---- admission -------------------------------------------------------------------------------------------------

    def admission(self, now: float) -> Admission:
        """Whether a delivery may begin now. If one does, call `begin`."""
        self.tick(now)
        if self.state is HELD:
            return Admission.PROBE if now >= self.due else Admission.NONE
        if self.state is RESUMING and self._begun >= self._limit:
            self._refused = True
            return Admission.NONE
        return Admission.ANY

    def begin(self, now: float) -> None:
        """A delivery begins. The next probe is due even if this one never ends."""
        if self.state is HELD:
            self._interval = min(2 * self._interval, MAX_PROBE_S)
            self.due = now + self._interval
        self._begun += 1

    def tick(self, now: float) -> None:
        """Time passed: a step of resuming may be over."""
        if self.state is not RESUMING or now < self.due:
            return
        if 2 * self._ended < self._begun and now - self._step_began < MAX_STEP_S:
            self.due = now + STEP_S
        elif self._refused:
            self._step(now, 2 * self._limit)
        else:
            self.state, self.limiting = CLOSED, False
            self._in_a_row.clear()
            self._interval = FIRST_PROBE_S

    # ---- transitions -----------------------------------------------------------------------------------------------

    def _hold(self, now: float, reason: str) -> None:
        if self.state is CLOSED:
            self._fine.clear()
            self._recovered.clear()
        self.state, self.limiting = HELD, True
        self.phase += 1
        self.reason = shortened(reason)
        self.due = now + self._interval

    def _resume(self, now: float) -> None:
        self.state = RESUMING
        self.phase += 1
        self._untried |= self._failing
        self._failing.clear()
        self._failing_anew.clear()
        self._step(now, FIRST_STEP)

    def _step(self, now: float, limit: int) -> None:
        self._limit, self._begun, self._ended, self._refused = limit, 0, 0, False
        self._step_began, self.due = now, now + STEP_S

    def _calm(self) -> None:
        """Most streams succeed: forget the failures. While it resumes, keep some successes to outweigh new failures."""
        self._failing.clear()
        self._failing_anew.clear()
        self._untried.clear()
        self._calm_phase = self.phase
        if self.state is CLOSED:
            self.watching = False
            self._fine.clear()
            self._recovered.clear()
        else:
            self._fine = set(islice(self._fine, CALM))


class Gate:
    """Drives the breaker of one subscription for its deliveries in this process. On one loop."""

    def __init__(self, name: str, *, enabled: bool = True) -> None:
        self.breaker = CircuitBreaker()
        self._name = name
        self._enabled = enabled
        self._loop = asyncio.get_running_loop()
        self._since_us = 0
        self._waiting: dict[GatedDelivery, None] = {}
        """Deliveries that may begin nothing now, in the order in which they are woken."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held(self) -> SubscriptionHold | None:
        """Why and since when the subscription is held; None if it is not."""
        breaker = self.breaker
        if not breaker.limiting:
            return None
        return SubscriptionHold(breaker.reason, self._since_us, breaker.state is RESUMING)

    # ---- calls of deliveries ---------------------------------------------------------------------------------------

    def ask(self, delivery: GatedDelivery) -> Admission:
        """Whether `delivery` may begin something. If not, it is woken when that may have changed."""
        admission = self.breaker.admission(self._loop.time())
        if admission is Admission.NONE:
            delivery.withheld = True
            self._waiting[delivery] = None
            self._schedule()
        return admission

    def begin(self) -> None:
        """A delivery begins."""
        self.breaker.begin(self._loop.time())

    def succeeded(self, stream: StreamId) -> None:
        """A delivery succeeded. Need not be called while the breaker is not watching."""
        was_held = self.breaker.state is HELD
        self.breaker.succeeded(self._loop.time(), stream)
        if was_held:
            log.warning("subscription %r resumes gradually: a delivery succeeded", self._name)
            self._wake_all()

    def ended(self) -> None:
        """A delivery ended, and its event is invalid."""
        self.breaker.ended()

    def failed(self, stream: StreamId, failure: FailedAttempt, *, earlier: int | None, exhausted: bool) -> bool:
        """A delivery failed. Return whether that counts against its event."""
        if not self._enabled:
            return not failure.unavailable
        breaker = self.breaker
        was = breaker.state
        counts = breaker.failed(
            self._loop.time(), stream, failure.reason,
            earlier=earlier, exhausted=exhausted, unavailable=failure.unavailable,
        )  # fmt: skip
        if was is not HELD and breaker.state is HELD:
            if was is CLOSED:
                self._since_us = now_us()
            log.warning(
                "subscription %r is held: %s, the last failure was %s; single events are tried", self._name,
                "a dependency is unavailable" if failure.unavailable else "deliveries of many streams fail",
                failure.reason, exc_info=None if failure.unavailable else failure.error,
            )  # fmt: skip
            self._schedule()
        return counts

    def leave(self, delivery: GatedDelivery) -> None:
        """The delivery ends."""
        self._waiting.pop(delivery, None)

    # ---- waking ----------------------------------------------------------------------------------------------------

    def _schedule(self, least_s: float = 0.0) -> None:
        """Take a turn when the breaker is due, but not before `least_s` seconds."""
        if self._timer is not None:
            self._timer.cancel()
        at = max(self.breaker.due, self._loop.time() + least_s) + LATE_S
        self._timer = self._loop.call_at(at, self._turn)

    def _turn(self) -> None:
        self._timer = None
        breaker, now = self.breaker, self._loop.time()
        breaker.tick(now)
        if breaker.state is not HELD:
            self._wake_all()
        elif self._waiting:
            if now >= breaker.due:
                self._wake(next(iter(self._waiting)))
            if self._waiting:
                self._schedule(FIRST_PROBE_S)  # if it has nothing to try, the next one is woken

    def _wake_all(self) -> None:
        """Wake all. Begin with the second, so that each time another one is first: the first may use up the step."""
        waiting = list(self._waiting)
        for delivery in waiting[1:] + waiting[:1]:
            self._wake(delivery)
        if self.breaker.state is RESUMING:
            self._schedule()
        else:
            log.warning("subscription %r goes on as before it was held", self._name)

    def _wake(self, delivery: GatedDelivery) -> None:
        del self._waiting[delivery]
        delivery.withheld = False
        delivery.wake()
