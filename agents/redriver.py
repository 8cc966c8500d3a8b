"""Redrives: dead letters that are delivered once more."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from ..streams.background import run_periodically
from ..streams.backoff import Backoff
from ..streams.clock import now_us
from ..streams.errors import Closed, HeadraceError, Unavailable
from ..streams.events import Event
from ..streams.failure_log import described
from ..streams.subscriptions import DeadLetter
from ..streams.transactions import RedriveRefused
from .delivery.group_redrives import RedriveRejected
from .host_state import HostState
from .progress_store import ProgressStore

log = logging.getLogger("headrace.agents")

MAX_PAUSE_S = 30.0
"""Longest pause before the result of a redrive is stored again, in seconds."""
REDRIVE_S = 1.0
MAX_REDRIVES = 16
"""Dead letters of a subscription that are delivered once more at the same time."""
_EARLIER = "; it had failed with: "
"""Separates the reason why a dead letter was not redriven from the reason of its failure."""


class Redriver:
    """Delivers the dead letters whose redrive was requested, for the subscriptions that this process serves."""

    def __init__(self, state: HostState, store: ProgressStore) -> None:
        self._state = state
        self._store = store
        self._redriving: dict[int, str] = {}
        """Subscription by the id of the dead letter."""
        self._noted: int | None = None
        """`HostState.noted` before the last look for requests, if that look found none; else None."""
        store.watch_redrives(state.note_change)

    async def run(self) -> None:
        """Start requested redrives periodically. Does not end."""
        await run_periodically(self._start_redrives, REDRIVE_S, self._wait_for_request)

    async def _wait_for_request(self) -> None:
        """If all requests are made in this process, return when there may be one that the last look did not
        find: one is requested, or a subscription begins."""
        if self._store.private and not self._redriving and self._noted is not None:
            await self._state.wait_for_change(noted=self._noted)

    async def _start_redrives(self) -> None:
        state = self._state
        self._noted = None
        noted = state.noted
        busy = Counter(self._redriving.values())
        names = [name for name, one in state.served.items() if busy[name] < MAX_REDRIVES and one.gate.held is None]
        queues = [queue for queue in range(state.queues) if state.reads(queue)]
        letters: Sequence[DeadLetter] = ()
        if names and queues:
            letters = await self._store.redrives(state.provider, names, queues=queues)
        if not letters and not any(one.gate.held for one in state.served.values()):
            self._noted = noted
        for letter in letters:
            if letter.id not in self._redriving and busy[letter.subscription] < MAX_REDRIVES:
                busy[letter.subscription] += 1
                self._redriving[letter.id] = letter.subscription
                task = state.background.start(self._redrive(letter), f"headrace redrive {letter.id}")
                task.add_done_callback(lambda _, number=letter.id: self._redriving.pop(number))

    async def _redrive(self, letter: DeadLetter) -> None:
        served = self._state.served.get(letter.subscription)
        if served is None or not served.definition.selector.matcher()(letter.stream):
            return  # the letter belongs to an earlier subscription of this name
        delivery = served.deliveries.get(letter.queue)
        if delivery is None:
            return
        try:
            error = await delivery.redrive(_event(letter))
        except Closed:
            return  # it is delivered when its queue is served again
        reason, attempts = None, letter.attempts + 1
        if error is not None:
            reason = str(error) if isinstance(error, (RedriveRejected, RedriveRefused)) else described(error)
        if error is not None and _blames_no_event(error):
            attempts = letter.attempts
            log.warning("subscription %r does not redrive dead letter %d: %s", letter.subscription, letter.id, reason)
            reason = f"{reason}{_EARLIER}{letter.reason.rpartition(_EARLIER)[2]}"
        elif error is not None:
            message = f"subscription {letter.subscription!r} failed on dead letter {letter.id} again: {reason}"
            delivery.failures.write(log, asyncio.get_running_loop().time(), message, error, first=True)
        if await self._finish(letter, delivered=error is None, reason=reason, attempts=attempts):
            delivery.reports.end_redriven(letter.token)
            delivery.progress.note_change()  # reports may be confirmed now

    async def _finish(self, letter: DeadLetter, *, delivered: bool, reason: str | None, attempts: int) -> bool:
        """Store the result of a redrive. While the store fails, try again: meanwhile it is not delivered again here.
        Return False if trying again does not help."""
        failed_at_us, backoff = now_us(), Backoff(REDRIVE_S, MAX_PAUSE_S)
        while True:
            try:
                await self._store.finish_redrive(
                    letter.id, delivered=delivered, reason=reason, attempts=attempts, failed_at_us=failed_at_us
                )
            except HeadraceError as failure:
                log.warning("cannot record yet that dead letter %d was redriven: %s", letter.id, failure)
                if not failure.retryable:
                    return False
                await asyncio.sleep(backoff.next_s())
            else:
                return True


def _blames_no_event(error: BaseException) -> bool:
    """Whether the handler was not called, or could not work: this does not count as an attempt."""
    if isinstance(error, RedriveRejected):
        return error.unavailable
    return isinstance(error, (RedriveRefused, Unavailable))


def _event(letter: DeadLetter) -> Event:
    return Event(
        letter.payload, letter.headers, letter.event_id, letter.timestamp_us, stream=letter.stream, token=letter.token
    )
