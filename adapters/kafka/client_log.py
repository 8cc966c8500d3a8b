"""Passes the log of librdkafka on to `logging`: few lines, in plain words."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable

REPEAT_S = 30.0
"""Lines of one kind about one broker are logged at most this often, in seconds."""
_THREAD = re.compile(r"^\[thrd:[^]]*\]: ")
_BROKER = re.compile(r"([\w.-]+:\d+)/(?:bootstrap|\d+)")
SINCE = re.compile(r" \(after \d+ms in state \w+(?:, \d+ identical error\(s\) suppressed)?\)")


class ClientLog:
    """Takes the log of the clients of one provider, in their threads.

    While a broker is away, each client would log 50 lines a second.
    """

    def __init__(
        self, log: logging.Logger, without_secrets: Callable[[str], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._without_secrets = without_secrets
        self._clock = clock
        self._lock = threading.Lock()
        self._logged: dict[tuple[str, str], float] = {}
        """When a line was logged last, by the kind of its event and its broker."""
        self._left_out: dict[tuple[str, str], int] = {}

    def log(self, level: int, _: str, kind: str, client: str, text: str) -> None:
        """Log a line, as confluent-kafka calls its `logger`. `kind` is librdkafka's name for the kind of event."""
        text = self._without_secrets(SINCE.sub("", _THREAD.sub("", text)))
        if kind == "GETPID" and text.endswith("retrying"):  # a broker that has just started
            level = logging.DEBUG
        found = _BROKER.search(text)
        event = kind, "" if found is None else found[1]
        if level < logging.WARNING:
            self._log.log(level, "Kafka client %s: %s", client, text)
            return
        left_out = self._may_log(event)
        if left_out is not None:
            more = f"; {left_out:,} lines like this were left out" if left_out else ""
            self._log.log(level, "Kafka client: %s%s", text, more)

    def _may_log(self, event: tuple[str, str]) -> int | None:
        """Return the number of lines about it that were left out. None: leave this one out."""
        with self._lock:
            now, logged = self._clock(), self._logged.get(event)
            if logged is not None and now - logged < REPEAT_S:
                self._left_out[event] = self._left_out.get(event, 0) + 1
                return None
            self._logged[event] = now
            return self._left_out.pop(event, 0)
