"""Log failures of a subscription's handler: first failures of an event as warnings, repeated ones rarely."""

from __future__ import annotations

import logging

from .errors import Unavailable
from .identity import SequenceToken, StreamId
from .transactions import RedriveRefused

BURST = 5
"""Number of first failures that are logged without a pause."""
REFILL_S = 10.0
"""After a burst, one more first failure is logged per this time, in seconds."""
REMINDER_S = 60.0
"""A repeated failure is logged as a warning if there was no warning for this time, in seconds."""


def failure_text(subscription: str, stream: StreamId, token: SequenceToken | None, outcome: str, reason: str) -> str:
    """Return the log line for a failed delivery; `outcome` names the next step."""
    return f"subscription {subscription!r} failed on event {token} of stream {stream}, {outcome}: {reason}"


def described(error: BaseException) -> str:
    """The text of a handler's error that is recorded. Never raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 (`str` of it runs foreign code)
        return type(error).__name__


class FailureLog:
    """Logs the failures of one subscription, at a bounded rate."""

    def __init__(self) -> None:
        self._credit = float(BURST)
        self._credited_at = 0.0
        self._logged_at = 0.0
        self._not_logged = 0

    def warn(self, now_s: float, *, first: bool) -> int | None:
        """Decide whether a failure at the loop time `now_s` is a warning; `first` says whether it is the first of its
        event. Returns None if not, else the number of failures since the last warning that were none."""
        self._credit = min(BURST, self._credit + (now_s - self._credited_at) / REFILL_S)
        self._credited_at = now_s
        if first and self._credit >= 1:
            self._credit -= 1
        elif now_s - self._logged_at < REMINDER_S:
            self._not_logged += 1
            return None
        not_logged, self._not_logged, self._logged_at = self._not_logged, 0, now_s
        return not_logged

    def write(
        self, log: logging.Logger, now_s: float, message: str, error: BaseException | None, *, first: bool
    ) -> None:
        """Log a failure if it is a warning, with the traceback of `error`, else at the level debug. An error that says
        that a dependency is down has its traceback only if debug is on: it is long, and says nothing of the handler."""
        if isinstance(error, (Unavailable, RedriveRefused)) and not log.isEnabledFor(logging.DEBUG):
            error = None
        not_logged = self.warn(now_s, first=first)
        if not_logged is None:
            log.debug("%s", message)
        elif not_logged:
            log.warning("%s (more failures, not shown: %d)", message, not_logged, exc_info=error)
        else:
            log.warning("%s", message, exc_info=error)
