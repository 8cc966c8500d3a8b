"""Dead letters for the dashboard: pages of them, with a filter, and those that an action concerns."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

from ...proto.v1.subscriptions_pb2 import DeadLetter
from ...streams.errors import InvalidArgument
from .calls import ServiceCalls

PAGE = 50
SCANNED = 1000
"""Dead letters of one call."""
MAX_SCANNED = 10_000
"""Dead letters that one request looks through at most. The next page continues there."""
MAX_IDS = 10_000


class LetterFilter(NamedTuple):
    """Which dead letters are meant."""

    provider: str
    subscription: str
    """Empty: of all subscriptions."""
    text: str = ""
    """Part of the stream's name, the reason, the event's id or the payload. Upper and lower case are the same."""

    def matches(self, letter: DeadLetter) -> bool:
        text = self.text.lower()
        return (
            not text
            or text in f"{letter.namespace}/{letter.key}".lower()
            or text in letter.reason.lower()
            or text in letter.event_id.lower()
            or text.encode() in letter.payload.lower()
        )


class LetterPage(NamedTuple):
    letters: list[DeadLetter]
    next_id: int | None
    """Where the next page begins; None after the last one."""


async def page_of(calls: ServiceCalls, wanted: LetterFilter, after_id: int, limit: int = PAGE) -> LetterPage:
    """Return the next dead letters that match."""
    found: list[DeadLetter] = []
    scanned = 0
    while True:
        page = await calls.dead_letters(wanted.provider, wanted.subscription, after_id, SCANNED)
        for letter in page:
            after_id = letter.id
            if wanted.matches(letter):
                found.append(letter)
            if len(found) == limit:
                return LetterPage(found, after_id)
        scanned += len(page)
        if not page:
            return LetterPage(found, None)
        if scanned >= MAX_SCANNED:
            return LetterPage(found, after_id)


async def ids_of(calls: ServiceCalls, wanted: LetterFilter) -> dict[str, list[int]]:
    """Return the ids of all dead letters that match, by subscription. Raise InvalidArgument if there are too many."""
    found: dict[str, list[int]] = {}
    after_id: int | None = 0
    while after_id is not None:
        letters, after_id = await page_of(calls, wanted, after_id, MAX_IDS)
        for letter in letters:
            found.setdefault(letter.subscription, []).append(letter.id)
        if sum(map(len, found.values())) > MAX_IDS:
            raise InvalidArgument(f"more than {MAX_IDS:,} dead letters match: narrow the filter")
    return found


def shown(letter: DeadLetter, *, payload: bool) -> dict[str, Any]:
    """Return a dead letter for the page. Its payload, headers and id are for viewers that may manage."""
    found: dict[str, Any] = {
        "id": letter.id,
        "subscription": letter.subscription,
        "stream": {"namespace": letter.namespace, "key": letter.key},
        "queue": letter.queue,
        "offset": letter.offset,
        "index": letter.index,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "failed_at_us": letter.failed_at_us,
        "timestamp_us": letter.timestamp_us,
        "redrive": letter.redrive,
        "bytes": len(letter.payload),
    }
    if payload:
        found["payload"] = base64.b64encode(letter.payload).decode()
        found["headers"] = dict(letter.headers)
        found["event_id"] = letter.event_id
    return found
