"""The mapper: the same stream in the same queue, always; queues evenly full; little memory."""

import json
import os
import random
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import InvalidArgument, StreamId
from headrace.balancer import StreamQueueMapper, mapper

# Queues of streams for 1, 2, 8 and 64 queues. These never change: stored events are where they say.
GOLDEN = {
    ("", ""): (0, 0, 5, 63),
    ("", "a"): (0, 0, 4, 15),
    ("a", ""): (0, 1, 5, 12),
    ("orders", "1"): (0, 0, 3, 59),
    ("orders", "2"): (0, 0, 2, 25),
    ("orders", "3"): (0, 0, 5, 53),
    ("flights", "N14228"): (0, 0, 0, 40),
    ("flights", "unknown"): (0, 1, 6, 54),
    ("a", "b/c"): (0, 0, 4, 27),
    ("a/b", "c"): (0, 1, 6, 39),
    ("größe", "東京"): (0, 1, 6, 33),
    ("telemetry", "device-42"): (0, 0, 0, 63),
    ("telemetry", "00000000-0000-0000-0000-000000000001"): (0, 1, 5, 62),
    ("n\x00", "%\n"): (0, 0, 5, 31),
    ("x" * 200, "y" * 1024): (0, 1, 3, 25),
}


RNG = random.Random(7)
SHAPES: dict[str, Callable[[int], str]] = {
    "uuid": lambda _: str(uuid.UUID(int=RNG.getrandbits(128))),
    "sequential": str,
    "common prefix": lambda number: f"customer/eu-west-1/device-{number:010d}",
    "common suffix": lambda number: f"{number}@devices.example.org",
    "unicode": lambda number: f"größe-東京-{number}",
}


def fullest(mapper: StreamQueueMapper, streams: list[StreamId]) -> float:
    """How many times the mean the fullest queue has."""
    return max(Counter(map(mapper.queue_of, streams)).values()) * mapper.queues / len(streams)


@pytest.mark.parametrize(("at", "queues"), [(0, 1), (1, 2), (2, 8), (3, 64)])
def test_streams_are_in_the_queues_where_they_have_always_been(at: int, queues: int):
    mapper = StreamQueueMapper(queues)
    found = {name: mapper.queue_of(StreamId(*name)) for name in GOLDEN}
    assert found == {name: expected[at] for name, expected in GOLDEN.items()}


def test_the_algorithm_keeps_its_name():
    assert mapper.VERSION == "ring-blake2b-1"


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_processes_with_other_hash_seeds_map_alike(seed: str):
    names = [("telemetry", f"device-{number}") for number in range(500)]
    script = (
        "import json, sys\n"
        "from headrace.balancer import StreamQueueMapper\n"
        "from headrace.streams.identity import StreamId\n"
        "mapper = StreamQueueMapper(16)\n"
        "print(json.dumps([mapper.queue_of(StreamId(*name)) for name in json.load(sys.stdin)]))\n"
    )
    there = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(names),
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    mapper = StreamQueueMapper(16)
    assert json.loads(there.stdout) == [mapper.queue_of(StreamId(*name)) for name in names]


@pytest.mark.parametrize("shape", SHAPES)
def test_eight_queues_share_20_000_streams_evenly(shape: str):
    streams = [StreamId("telemetry", SHAPES[shape](number)) for number in range(20_000)]
    assert fullest(StreamQueueMapper(8), streams) <= 1.25


@pytest.mark.parametrize("queues", [1, 2, 3, 5, 7, 12, 16, 24, 33, 48, 63, 64])
def test_up_to_64_queues_are_evenly_full(queues: int):
    streams = [StreamId("orders", str(number)) for number in range(400 * queues)]
    assert fullest(StreamQueueMapper(queues), streams) <= 1.25


def test_every_queue_of_the_largest_provider_gets_streams():
    mapper = StreamQueueMapper(1024)
    used = {mapper.queue_of(StreamId("orders", str(number))) for number in range(30_000)}
    assert used == set(range(1024))


def described(namespace: str, key: str, queues: int) -> int:
    """The mapper's docstring, written down without a ring: the owner of the nearest point above, going round."""

    def position(name: bytes) -> int:
        return int.from_bytes(blake2b(name, digest_size=8).digest(), "big")

    first, second = namespace.encode(), key.encode()
    name = position(bytes([0x0A, len(first), *first, 0x12, len(second), *second]))  # protobuf's fields 1 and 2
    each = min(1024, 65536 // queues)
    points = ((position(f"{queue}-{point}".encode()), queue) for queue in range(queues) for point in range(each))
    return min(((at - name - 1) % (1 << 64), queue) for at, queue in points)[1]


SHORT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(SHORT, SHORT, st.sampled_from([1, 2, 3, 8]))
def test_the_queue_is_the_one_that_the_description_gives(namespace: str, key: str, queues: int):
    assert StreamQueueMapper(queues).queue_of(StreamId(namespace, key)) == described(namespace, key, queues)


def test_the_boundary_between_namespace_and_key_counts():
    mapper = StreamQueueMapper(64)
    pairs = [(StreamId(f"n{i}", "/k"), StreamId(f"n{i}/", "k")) for i in range(200)]
    same = sum(mapper.queue_of(a) == mapper.queue_of(b) for a, b in pairs)
    assert same < 20  # 200 / 64 by chance


def test_remembering_is_bounded_and_changes_no_answer():
    small, other = StreamQueueMapper(8, max_remembered=10), StreamQueueMapper(8)
    streams = [StreamId("orders", str(number)) for number in range(35)]
    assert list(map(small.queue_of, streams)) == list(map(other.queue_of, streams[::-1]))[::-1]
    assert small.remembered <= 10


@pytest.mark.parametrize("queues", [0, -1, 1025])
def test_a_number_of_queues_that_cannot_be_is_refused(queues: int):
    with pytest.raises(InvalidArgument, match=f"1 to 1,024 queues, not {queues}"):
        StreamQueueMapper(queues)
