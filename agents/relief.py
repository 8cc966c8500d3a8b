"""Which cursors leave a full cache, and which catch-ups end early, so that slow consumers do not hold up the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..streams.identity import SequenceToken
from ..streams.subscriptions import SlowConsumer
from .cache import Bucket
from .catch_up_runner import CatchUpRunner
from .cursor import CursorState, StreamCursor
from .delivery.delivery import Delivery
from .feed import CatchUp, Feed

PATIENCE = 8
"""A cursor that does not move is detached after so many times `detach_after_s`, however slow the others are."""
CATCH_UP_TURN_S = 1.0
"""A catch-up whose handlers are slow makes way for another after this time, in seconds. A catch-up of remote consumers
makes way at once, because their batches can be read again."""


class _Seen(NamedTuple):
    """A cursor in the oldest bucket of a full cache, when it was first seen at its position."""

    token: SequenceToken
    since: float
    """Loop time."""
    turns: int
    """Turns of all cursors of its delivery until then."""


class CacheRelief:
    """Relieves the full caches of one queue."""

    def __init__(
        self,
        deliveries: Mapping[str, Delivery],
        catch_ups: CatchUpRunner,
        *,
        rewindable: bool,
        detach_after_s: float,
        max_bytes: int,
    ) -> None:
        """Cursors that left their cache while they run keep at most `max_bytes` bytes, or one batch."""
        self._deliveries = deliveries
        self._catch_ups = catch_ups
        self._rewindable = rewindable
        self._detach_after_s = detach_after_s
        self._max_bytes = max_bytes
        self._seen: WeakKeyDictionary[Feed, dict[StreamCursor, _Seen]] = WeakKeyDictionary()
        """The cursors in the oldest bucket of a full cache."""
        self._unseen: dict[Delivery, tuple[int, float]] = {}
        """Deliveries that have not looked at all of the main feed's oldest bucket, while its cache is full: the offset
        of the first batch that they have not looked at, and the loop time since which it is the same."""

    def is_detachable(self, delivery: Delivery) -> bool:
        """Whether the cursors of a delivery may leave a cache: the queue can rewind, and the subscription allows it."""
        return self._rewindable and delivery.definition.slow_consumer is not SlowConsumer.THROTTLE

    def relieve(self, feed: Feed) -> None:
        """The feed's cache is full: detach cursors in its oldest bucket.

        A cursor is detached if it makes no progress, or if it would hold up another subscription that has nothing left
        to do. A catch-up makes way for another one, and ends while its delivery accepts nothing."""
        if not feed.cache.buckets:
            return
        oldest = feed.cache.buckets[0]
        starved = any(map(_is_starved, feed.deliveries))
        held = self._held_apart()
        streams = {entry.batch.stream for entry in oldest.entries}
        detachable = [d for d in self._deliveries.values() if self.is_detachable(d)]
        there = [(d, d.progress.cursors.get(stream)) for d in detachable for stream in streams]
        pinning = [(d, cursor) for d, cursor in there if cursor is not None and cursor.bucket is oldest]
        stuck = self._stuck(feed, pinning)
        for delivery, cursor in pinning:
            size = delivery.held(cursor)
            fits = not held or held + size <= self._max_bytes  # the first batch always fits, however large it is
            if fits and (starved or cursor in stuck) and not _alone(feed, delivery):
                held += size
                delivery.detach(cursor)
                delivery.counts.detached += 1
        if not isinstance(feed, CatchUp):
            self._part_with_slow(feed, oldest, starved=starved)
        elif self._is_idle(feed) or self._in_demand(feed):
            feed.give_way()

    def _part_with_slow(self, main: Feed, oldest: Bucket, *, starved: bool) -> None:
        """Take deliveries out of the main feed that have not looked at all batches of its oldest bucket, if another
        delivery has nothing left to do, or if they have not moved for `detach_after_s` seconds. A delivery that is
        alone in the feed stays."""
        now, before = asyncio.get_running_loop().time(), self._unseen
        self._unseen = {}
        for delivery in list(main.deliveries):
            unseen = delivery.progress.unseen
            if unseen is None or unseen.bucket is not oldest or not self.is_detachable(delivery):
                continue
            offset, since = before.get(delivery, (-1, now))
            since = since if offset == unseen.batch.offset else now
            if len(main.deliveries) > 1 and (starved or now - since >= self._detach_after_s):
                main.part_with(delivery)
                self._catch_ups.serve(delivery)
            else:
                self._unseen[delivery] = unseen.batch.offset, since

    def _is_idle(self, feed: CatchUp) -> bool:
        """Whether the delivery of a catch-up accepts nothing: at this moment if other catch-ups wait for the slot,
        otherwise for `detach_after_s` seconds."""
        now = asyncio.get_running_loop().time()
        if feed.delivery.is_accepting:
            feed.idle_since = None
            return False
        if feed.idle_since is None:
            feed.idle_since = now
        return self._catch_ups.is_contended or now - feed.idle_since >= self._detach_after_s

    def _in_demand(self, feed: CatchUp) -> bool:
        """Whether others wait for the slot of a catch-up that has had its turn, and the batches that its handlers would
        keep outside of the cache are not too large."""
        cursors = feed.delivery.progress.cursors.values()
        contended = self._catch_ups.is_contended
        wanted = contended or (feed.finished and any(c.state is CursorState.PARKED and c.feed is None for c in cursors))
        if not wanted:
            return False
        sizes = [feed.delivery.held(c) for c in cursors if c.feed is feed and c.state is CursorState.RUNNING]
        if contended and not any(sizes):
            return True
        if asyncio.get_running_loop().time() - feed.began_at < CATCH_UP_TURN_S:
            return False
        held = self._held_apart()
        return held + sum(sizes) <= self._max_bytes or (not held and len(sizes) == 1)

    def _held_apart(self) -> int:
        """Bytes of batches that handlers and consumers keep outside of all caches."""
        apart = [(d, c) for d in self._deliveries.values() for c in d.progress.cursors.values() if c.entry is None]
        return sum(max(d.held(c), c.batch.nbytes) for d, c in apart if c.batch is not None)

    def _stuck(self, feed: Feed, pinning: Iterable[tuple[Delivery, StreamCursor]]) -> set[StreamCursor]:
        """Return those of the cursors that make no progress. Each cursor that is ready or running has its turn within
        as many turns as there are such cursors: if all are slow because the processor is busy, none is stuck."""
        now, before = asyncio.get_running_loop().time(), self._seen.get(feed, {})
        seen = self._seen[feed] = {}
        stuck: set[StreamCursor] = set()
        for delivery, cursor in pinning:
            turns = delivery.counts.delivered_batches + delivery.counts.retries
            at = before.get(cursor)
            if at is None or at.token != cursor.token:
                at = _Seen(cursor.token, now, turns)
            seen[cursor] = at
            passed_s, passed = now - at.since, turns - at.turns
            states = delivery.progress.states
            its_turn = states.running + len(delivery.progress.ready) - states.outdated
            goes_on = cursor.state is not CursorState.WAITING and 0 < passed < 2 * its_turn
            if passed_s >= self._detach_after_s * (PATIENCE if goes_on else 1):
                stuck.add(cursor)
        return stuck


def _is_starved(delivery: Delivery) -> bool:
    """Whether nothing is left for a delivery in the cache."""
    progress = delivery.progress
    return progress.unseen is None and all(cursor.entry is None for cursor in progress.cursors.values())


def _alone(feed: Feed, delivery: Delivery) -> bool:
    """Whether a catch-up serves one stream only, so that no other stream waits for its batches."""
    if not isinstance(feed, CatchUp) or feed.finished:
        return False
    if delivery.definition.selector.explicit or feed.whole:
        return delivery.definition.selector.explicit
    cursors = delivery.progress.cursors.values()
    due = (c for c in cursors if c.feed is feed or (c.state is CursorState.PARKED and c.feed is None))
    return len(list(islice(due, 2))) < 2
