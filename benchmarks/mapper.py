"""Measures the mapper: the time of a look-up and of building the ring, and how evenly streams spread.

    python -m benchmarks.mapper

Times are the best of five rounds, in this process; the spread is the fullest queue divided by the mean.
"""

from __future__ import annotations

import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence

from headrace import StreamId
from headrace.balancer import StreamQueueMapper

STREAMS = 100_000
ROUNDS = 5


def key_shapes() -> dict[str, list[StreamId]]:
    """100,000 streams each, in the shapes that keys usually have."""
    rng = random.Random(2013)
    numbers = range(STREAMS)
    keys: dict[str, list[str]] = {
        "uuid": [str(uuid.UUID(int=rng.getrandbits(128))) for _ in numbers],
        "sequential": [str(number) for number in numbers],
        "common prefix": [f"customer/eu-west-1/device-{number:010d}" for number in numbers],
        "unicode": [f"größe-東京-{number}" for number in numbers],
    }
    return {shape: [StreamId("telemetry", key) for key in of_shape] for shape, of_shape in keys.items()}


def best_ns(measured: Callable[[], int]) -> float:
    """Nanoseconds per look-up of the best round; `measured` returns how many it made."""
    rounds: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter_ns()
        count = measured()
        rounds.append((time.perf_counter_ns() - begin) / count)
    return min(rounds)


def look_up_all(mapper: StreamQueueMapper, streams: Sequence[StreamId]) -> int:
    queue_of = mapper.queue_of
    for stream in streams:
        queue_of(stream)
    return len(streams)


def first_look_up_ns(shape: Sequence[StreamId]) -> float:
    """A stream that neither the mapper nor the encoder has met."""
    rounds: list[float] = []
    for _ in range(ROUNDS):
        mapper = StreamQueueMapper(8)
        fresh = [StreamId(stream.namespace, stream.key) for stream in shape]
        begin = time.perf_counter_ns()
        rounds.append((look_up_all(mapper, fresh), time.perf_counter_ns() - begin)[1] / len(fresh))
    return min(rounds)


def build_ms(queues: int) -> float:
    def build() -> int:
        StreamQueueMapper(queues)
        return 1

    return best_ns(build) / 1e6


def spread(streams: Sequence[StreamId], queues: int) -> float:
    mapper = StreamQueueMapper(queues)
    return max(Counter(map(mapper.queue_of, streams)).values()) * queues / len(streams)


def main() -> None:
    shapes = key_shapes()
    known, mapper = shapes["uuid"][:10_000], StreamQueueMapper(8)
    twins = [StreamId(stream.namespace, stream.key) for stream in known]
    look_up_all(mapper, known)
    print(f"Python {sys.version.split()[0]}, {STREAMS:,} streams")
    print(f"look-up, stream first seen      {first_look_up_ns(shapes['uuid']):8.0f} ns")
    print(f"look-up, remembered, same object{best_ns(lambda: look_up_all(mapper, known)):8.0f} ns")
    print(f"look-up, remembered, equal      {best_ns(lambda: look_up_all(mapper, twins)):8.0f} ns")
    for queues in (1, 8, 64, 256, 1024):
        row = "  ".join(f"{shape} {spread(streams, queues):.3f}" for shape, streams in shapes.items())
        print(f"{queues:5} queues: built in {build_ms(queues):4.0f} ms; fullest / mean: {row}")
    worst = max((spread(shapes["sequential"], queues), queues) for queues in range(1, 65))
    print(f"worst of 1 to 64 queues, sequential: {worst[0]:.3f} ({worst[1]} queues)")


if __name__ == "__main__":
    main()
