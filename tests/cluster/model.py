"""Invariants of a cluster under all failures, checked when an event is handed out, finished, or stored."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace import StreamId
from headrace.streams.subscriptions import Checkpoint


class Did(NamedTuple):
    """The holder that finished an event last, and the time."""

    who: Any
    sent_at: float
    """When a silo sent it the event."""
    at: float


class Progress:
    """Of one subscription in one stream, whose events have the numbers 0, 1, …"""

    def __init__(self, first: int) -> None:
        self.last_done: dict[int, Did] = {}
        self.low = first
        """Everything below is done, or was there before the subscription."""
        self.done = set[int]()
        self.sent_at: dict[int, float] = {}
        self.hands: dict[int, object] = {}
        """Who processes an event: the silo with its handler, or a consumer."""

    def finish(self, number: int, did: Did) -> bool:
        """Note that an event was handled. Return False if it was handled before."""
        self.hands.pop(number, None)
        self.last_done[number] = did
        if number < self.low or number in self.done:
            return False
        self.done.add(number)
        while self.low in self.done:
            self.done.discard(self.low)
            self.low += 1
        return True

    def missing(self, number: int, who: object) -> int | None:
        """An event before this one that is neither done nor in the same hands."""
        before = (n for n in range(self.low, number) if n not in self.done)
        return next((n for n in before if self.hands.get(n) is not who), None)


Again = Callable[[str, Did, Any], None]
"""Called with an event that comes again after it was done, with its former and its present consumer."""


class Model:
    def __init__(self, problem: Callable[[str], None], now: Callable[[], float], again: Again) -> None:
        self._problem = problem
        self._now = now
        self._again = again
        self.published = Counter[StreamId]()
        self.events: dict[tuple[int, int], tuple[StreamId, int, int]] = {}
        """By queue and offset: the stream, the number of the first event, and how many there are."""
        self.progress: dict[tuple[str, StreamId], Progress] = {}
        self.first: dict[str, Mapping[StreamId, int]] = {}
        """By subscription: how much of each stream was there before it."""
        self.generations = Counter[str]()
        """That of the last seek, by subscription."""
        self.epochs: dict[int, int] = {}
        self.stored: dict[tuple[str, int], Checkpoint] = {}
        self.again = 0
        """Events that were finished more than once."""
        self.handed = 0
        self.given_up = set[tuple[str, int, int, int]]()

    def subscribed(self, name: str, *, from_the_beginning: bool = False) -> None:
        self.first[name] = {} if from_the_beginning else dict(self.published)

    def of(self, subscription: str, stream: StreamId) -> Progress:
        key = subscription, stream
        if key not in self.progress:
            self.progress[key] = Progress(self.first[subscription].get(stream, 0))
        return self.progress[key]

    def publishes(self, queue: int, offset: int, stream: StreamId, events: int) -> None:
        self.events[queue, offset] = stream, self.published[stream], events
        self.published[stream] += events

    def sends(self, subscription: str, queue: int, offset: int, indexes: Iterable[int], epoch: int, who: str) -> None:
        """A silo sends events to a consumer or a handler. They may arrive late."""
        stream, first, _ = self.events[queue, offset]
        for index in indexes:
            self.of(subscription, stream).sent_at[first + index] = self._now()
            if self.is_stored(subscription, stream, queue, offset, index):
                self._problem(
                    f"{subscription}: {who} sends {stream} at {queue}/{offset}/{index}, which is stored as done"
                )
        if epoch < self.epochs.get(queue, 0):
            self._problem(f"{who} serves queue {queue} under epoch {epoch}, after epoch {self.epochs[queue]}")
        self.epochs[queue] = max(epoch, self.epochs.get(queue, 0))

    def seeks(self, subscription: str, positions: Mapping[int, Checkpoint], generation: int) -> None:
        """The position was moved: everything from it on comes again, and nothing before it."""
        self.generations[subscription] = generation
        before = Counter[StreamId]()
        for (queue, offset), (stream, first, events) in self.events.items():
            if offset < positions[queue].next_offset:
                before[stream] = max(before[stream], first + events)
        self.first[subscription] = before
        for key in [key for key in self.progress if key[0] == subscription]:
            del self.progress[key]
        for queue, position in positions.items():
            self.stored[subscription, queue] = position

    def hands_out(
        self, subscription: str, queue: int, offset: int, indexes: Iterable[int], who: Any, generation: int = 0
    ) -> None:
        """A handler or a consumer gets events of a generation."""
        if generation < self.generations[subscription]:
            return
        stream, first, _ = self.events[queue, offset]
        progress = self.of(subscription, stream)
        where = f"{subscription}: {who.name} gets {stream} at {queue}/{offset}"
        for index in indexes:
            number = first + index
            self.handed += 1
            missing = progress.missing(number, who)
            if missing is not None:
                self._problem(f"{where}: number {number}, but {missing} is neither done nor in the same hands")
            if (did := progress.last_done.get(number)) is not None:
                self._again(f"{where}: number {number}", did, who)
            if getattr(who, "keeps_positions", False) and self.is_stored(subscription, stream, queue, offset, index):
                self._problem(f"{where}: number {number}, which is before the position that it has kept")
            progress.hands[number] = who

    def is_stored(self, subscription: str, stream: StreamId, queue: int, offset: int, index: int) -> bool:
        stored = self.stored.get((subscription, queue))
        if stored is None:
            return False
        behind = stored.behind.get(stream)
        if behind is None:
            return offset < stored.next_offset
        return (offset, index) < behind.token or any(at == offset and a <= index < b for at, a, b in behind.done)

    def finishes(
        self, subscription: str, queue: int, offset: int, indexes: Iterable[int], who: object, generation: int = 0
    ) -> None:
        if generation < self.generations[subscription]:
            return
        stream, first, _ = self.events[queue, offset]
        progress = self.of(subscription, stream)
        for number in [first + index for index in indexes]:
            if not progress.finish(number, Did(who, progress.sent_at.get(number, 0.0), self._now())):
                self.again += 1

    def gives_back(self, subscription: str, queue: int, offset: int, index: int, who: object) -> None:
        """The event was rejected: neither it nor any later event of its stream is in these hands any longer."""
        stream, first, _ = self.events[queue, offset]
        hands = self.of(subscription, stream).hands
        for number in [number for number, holder in hands.items() if holder is who and number >= first + index]:
            del hands[number]

    def check_saved(self, subscription: str, events: Iterable[tuple[int, int, int, int]], who: str) -> None:
        """These events (generation, queue, offset, index) were confirmed as saved."""
        for generation, queue, offset, index in events:
            stream = self.events[queue, offset][0]
            if generation == self.generations[subscription] and not self.is_stored(
                subscription, stream, queue, offset, index
            ):
                self._problem(f"{subscription}: {who} was told that {stream} at {queue}/{offset}/{index} is saved")
                return

    def gives_up(self, subscription: str, queue: int, offset: int, index: int, who: object) -> None:
        self.given_up.add((subscription, queue, offset, index))
        stream, first, _ = self.events[queue, offset]
        self.of(subscription, stream).finish(first + index, Did(who, self._now(), self._now()))

    def stores(self, subscription: str, queue: int, checkpoint: Checkpoint) -> None:
        """All that it says is done must be done."""
        self.stored[subscription, queue] = checkpoint

    def left(self, subscriptions: Sequence[str]) -> int:
        return sum(
            total - self.of(name, stream).low for name in subscriptions for stream, total in self.published.items()
        )
