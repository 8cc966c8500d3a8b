"""What happened in a test: the events that were published, and each delivery of them with its outcome."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from ..streams.events import Event
from ..streams.failure_log import described
from ..streams.identity import SequenceToken, StreamId
from ..streams.subscriptions import DeadLetter

RUNNING = "running"
HANDLED = "handled"
_SHOWN_PAYLOAD = 60
_SHOWN_LINES = 100


@dataclass(slots=True)
class RecordedDelivery:
    """One call of a handler with one event. A handler of batches has one for each event of the batch."""

    subscription: str
    event: Event
    attempt: int
    """1 for the first delivery of the event to the subscription."""
    at: timedelta
    """Virtual time since the beginning of the test."""
    error: BaseException | None = None
    """The exception that the handler raised, if it did."""
    is_running: bool = True

    @property
    def is_handled(self) -> bool:
        """Whether the handler returned."""
        return not self.is_running and self.error is None

    @property
    def outcome(self) -> str:
        if self.is_running:
            return RUNNING
        return HANDLED if self.error is None else f"failed: {described(self.error)}"

    @property
    def stream(self) -> StreamId | None:
        return self.event.stream

    @property
    def line(self) -> str:
        """The delivery in the history."""
        event = self.event
        return (
            f"{_time(self.at)} {self.subscription} {event.stream} {_token(event.token)} {shown(event.payload)} "
            f"attempt {self.attempt}: {self.outcome}"
        )


@dataclass(slots=True)
class RecordedPublish:
    """An event that was published."""

    stream: StreamId
    token: SequenceToken | None
    """None if the event is delayed, or the publish failed."""
    payload: bytes
    at: timedelta
    note: str

    @property
    def line(self) -> str:
        """The publish in the history."""
        return f"{_time(self.at)} published {self.stream} {_token(self.token)} {shown(self.payload)}{self.note}"


class DeliveryHistory:
    """Records publishes and deliveries."""

    def __init__(self, now: Callable[[], timedelta]) -> None:
        self.now = now
        self.deliveries: list[RecordedDelivery] = []
        self._entries: list[RecordedDelivery | RecordedPublish] = []
        """Everything in its order."""
        self._attempts = Counter[tuple[str, StreamId | None, SequenceToken | None]]()

    def publishing(self, stream: StreamId, payload: bytes, note: str) -> RecordedPublish:
        """Record an event that is being published."""
        record = RecordedPublish(stream, None, payload, self.now(), note)
        self._entries.append(record)
        return record

    @contextmanager
    def delivering(self, subscription: str, events: Iterable[Event]) -> Generator[None]:
        """Record the deliveries of some events, for the length of a `with`."""
        records = [self._begin(subscription, event) for event in events]
        try:
            yield
        except BaseException as error:
            for record in records:
                record.is_running, record.error = False, error
            raise
        for record in records:
            record.is_running = False

    def _begin(self, subscription: str, event: Event) -> RecordedDelivery:
        key = subscription, event.stream, event.token
        self._attempts[key] += 1
        record = RecordedDelivery(subscription, event, self._attempts[key], self.now())
        self.deliveries.append(record)
        self._entries.append(record)
        return record

    def of(self, subscription: str, stream: StreamId | None = None) -> list[RecordedDelivery]:
        """Return the deliveries to a subscription, of one stream or of all, in their order."""
        return [
            each
            for each in self.deliveries
            if each.subscription == subscription and stream in (None, each.event.stream)
        ]

    # ---- as text ---------------------------------------------------------------------------------------------------

    def text(self, letters: Sequence[DeadLetter], stream: StreamId | None = None) -> str:
        """Return the history of one stream, or of all, a line for each publish, delivery and dead letter."""
        texts = [each.line for each in self._entries if stream in (None, each.stream)]
        if len(texts) > _SHOWN_LINES:
            texts = [f"({len(texts) - _SHOWN_LINES} earlier lines are left out)", *texts[-_SHOWN_LINES:]]
        texts += [
            f"dead letter of {letter.subscription}: {letter.stream} {_token(letter.token)} {shown(letter.payload)}, "
            f"{letter.attempts} attempts: {letter.reason}"
            for letter in letters
            if stream in (None, letter.stream)
        ]
        return "\n".join(f"  {text}" for text in texts) or "  (nothing was published or delivered)"


def _time(at: timedelta) -> str:
    return f"{at.total_seconds():>10.3f} s"


def _token(token: SequenceToken | None) -> str:
    return "-" if token is None else str(token)


def shown(payload: bytes) -> str:
    """Return a payload for a message: as text if it is text, and cut if it is long."""
    try:
        text = repr(payload.decode())
    except UnicodeDecodeError:
        text = repr(payload)
    return text if len(text) <= _SHOWN_PAYLOAD else f"{text[:_SHOWN_PAYLOAD]}…"


def since_start(loop: asyncio.AbstractEventLoop) -> Callable[[], timedelta]:
    """Return a clock that begins now."""
    began = loop.time()
    return lambda: timedelta(seconds=loop.time() - began)
