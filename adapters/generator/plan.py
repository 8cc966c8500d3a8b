"""Generates batch k of queue q as a pure function of (seed, q, k, options)."""

from __future__ import annotations

import random
from array import array
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from struct import pack

from ...proto.v1 import events_pb2
from ...streams.errors import InvalidArgument
from ...streams.events import EventBatch
from ...streams.identity import StreamId
from .options import GeneratorOptions

POISON = "poison"
"""The header that marks a poison event; its value is `true`."""

_BLOCKS = 4
"""Number of different payload columns; batches share them."""
_REMEMBERED_STREAMS = 1 << 17
_NAMES_TRIED = 1 << 16
_MASK = (1 << 64) - 1
_POISONED = events_pb2.EventBatch(headers=[events_pb2.Headers(values={POISON: "true"})]).SerializeToString()
_NO_HEADERS = events_pb2.EventBatch(headers=[events_pb2.Headers()]).SerializeToString()


class GeneratorPlan:
    """Generates batches. Payload columns are encoded once and shared, so a batch costs little more than a copy."""

    def __init__(self, options: GeneratorOptions, queue_of: Callable[[StreamId], int] | None = None) -> None:
        self.options = options
        self._queue_of = queue_of
        self._shares = _shares(options.streams, options.skew)
        self.stream = lru_cache(_REMEMBERED_STREAMS)(self._stream)
        self._block = lru_cache(2 * _BLOCKS)(self._make_block)
        self._salt = cache(self._make_salt)

    def batch(self, queue: int, offset: int, count: int, time_us: int) -> EventBatch:
        """Return the batch at `offset`, with `count` events."""
        draw = _mix(self._salt(queue) + offset)
        stream = self.stream(queue, self._pick(draw))
        # Fields may come in any order: namespace and key, field 4 (timestamps_us) with one value, then the shared rest.
        parts = (stream.prefix, b"\x22\x08", pack("<q", time_us), self._block(count, draw % _BLOCKS))
        if self.options.poison:
            parts = (*parts, self._headers(draw, count))
        return EventBatch(stream, b"".join(parts), count, offset)

    def fails(self, queue: int, read: int) -> bool:
        """Return whether attempt number `read` to read a queue raises StorageError."""
        odds = self.options.read_errors
        return bool(odds) and _fraction(_mix(~self._salt(queue) + read)) < odds

    def stall_s(self, offset: int) -> float:
        """Return how many seconds a receiver stops before the batch at `offset`."""
        every = self.options.stall_every
        return self.options.stall_s if every and offset and offset % every == 0 else 0.0

    def _stream(self, queue: int, number: int) -> StreamId:
        """Return stream `number` of a queue. If the provider's mapper is known, it maps the stream to this queue."""
        for attempt in range(_NAMES_TRIED):
            stream = StreamId(self.options.namespace, f"{queue}-{number}" + (f".{attempt}" if attempt else ""))
            if self._queue_of is None or self._queue_of(stream) == queue:
                return stream
        raise InvalidArgument(
            f"none of {_NAMES_TRIED:,} names is mapped to queue {queue}: give the provider fewer queues"
        )

    def _pick(self, draw: int) -> int:
        if self._shares is None:
            return int(_fraction(draw) * self.options.streams)
        return bisect(self._shares, _fraction(draw) * self._shares[-1], hi=self.options.streams - 1)

    def _make_salt(self, queue: int) -> int:
        return _mix(_mix(self.options.seed) + queue)

    def _headers(self, draw: int, count: int) -> bytes:
        """Return the encoded headers of `count` events, with those of poison events; b"" if no event is poison."""
        rng, odds = random.Random(draw), self.options.poison  # noqa: S311 (data to test with)
        poisoned = [rng.random() < odds for _ in range(count)]
        return b"".join(_POISONED if one else _NO_HEADERS for one in poisoned) if any(poisoned) else b""

    def _make_block(self, count: int, variant: int) -> bytes:
        """Return the encoded sizes and payloads of `count` events."""
        rng = random.Random(f"{self.options.seed}/{variant}")  # noqa: S311 (data to test with)
        low, high = self.options.payload_range
        sizes = [rng.randint(low, high) for _ in range(count)]
        return events_pb2.EventBatch(sizes=sizes, payload=rng.randbytes(sum(sizes))).SerializeToString()


def _shares(streams: int, skew: float) -> Sequence[float] | None:
    """Return the cumulated shares of the streams by Zipf's law, None if they are equal."""
    return array("d", accumulate((number + 1) ** -skew for number in range(streams))) if skew else None


def _mix(value: int) -> int:
    """Return 64 well mixed bits of any integer (splitmix64, which is cheaper than seeding a generator)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _fraction(draw: int) -> float:
    """Return the upper bits as a number from 0 (inclusive) to 1 (exclusive). The lowest bits serve other choices."""
    return (draw >> 11) * 2.0**-53
