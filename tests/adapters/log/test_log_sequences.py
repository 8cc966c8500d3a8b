"""Idempotent producers: a retried publish is stored once, and none leaves a hole."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import EventBatch, InvalidArgument, SequenceConflict, SequenceToken, StreamId
from headrace.adapters import Bounds, ProducerSequence, Receipt
from headrace.adapters.log import LogAdapter, LogOptions
from headrace.adapters.log.environment import acquire, release
from headrace.adapters.log.retention import PRODUCER_AGE_S, expire_producers
from headrace.adapters.log.rows import ProducerRow

OpenLog = Callable[..., Awaitable[LogAdapter]]


def batches(count: int = 1) -> list[tuple[int, EventBatch]]:
    return [(0, EventBatch.of(StreamId("tests", "sequences"), [b"x"]))] * count


def number(value: int, previous: int, producer: str = "p") -> ProducerSequence:
    return ProducerSequence(producer, value, previous)


async def test_a_retry_of_the_last_call_gets_the_same_tokens(open_log: OpenLog):
    adapter = await open_log()
    await adapter.enqueue(batches(), sequence=number(5, 0))
    first = await adapter.enqueue(batches(2), sequence=number(9, 5))
    retry = await adapter.enqueue(batches(2), sequence=number(9, 5))
    assert [receipt.token for receipt in first] == [SequenceToken(1), SequenceToken(2)]
    assert list(retry) == [Receipt(receipt.token, duplicate=True) for receipt in first]
    assert await adapter.bounds(0) == Bounds(0, 3)


async def test_a_retry_after_a_restart_is_still_a_duplicate(open_log: OpenLog):
    adapter = await open_log()
    [first] = await adapter.enqueue(batches(), sequence=number(1, 0))
    await adapter.aclose()
    adapter = await open_log()
    assert await adapter.last_sequence("p") == 1
    [retry] = await adapter.enqueue(batches(), sequence=number(1, 0))
    assert retry == Receipt(first.token, duplicate=True)


async def test_an_older_call_is_a_duplicate_whose_place_is_not_known(open_log: OpenLog):
    adapter = await open_log()
    await adapter.enqueue(batches(), sequence=number(1, 0))
    await adapter.enqueue(batches(), sequence=number(2, 1))
    assert list(await adapter.enqueue(batches(2), sequence=number(1, 0))) == [Receipt(None, duplicate=True)] * 2


async def test_a_retry_of_very_many_batches_is_a_duplicate(open_log: OpenLog):
    adapter = await open_log()
    await adapter.enqueue(batches(2000), sequence=number(1, 0))
    retry = await adapter.enqueue(batches(2000), sequence=number(1, 0))
    assert all(receipt.duplicate for receipt in retry)
    assert len(retry) == 2000
    assert await adapter.bounds(0) == Bounds(0, 2000)


async def test_a_hole_is_refused_with_the_missing_number(open_log: OpenLog):
    adapter = await open_log()
    await adapter.enqueue(batches(), sequence=number(1, 0))
    with pytest.raises(SequenceConflict, match="call 3 follows call 2, but the last one stored is 1"):
        await adapter.enqueue(batches(), sequence=number(3, 2))
    assert await adapter.bounds(0) == Bounds(0, 1)


async def test_calls_of_one_producer_within_a_commit(open_log: OpenLog):
    adapter = await open_log()
    calls = [number(1, 0), number(2, 1), number(2, 1), number(4, 3), number(3, 2), number(1, 0)]
    answers = await asyncio.gather(
        *(adapter.enqueue(batches(), sequence=sequence) for sequence in calls), return_exceptions=True
    )
    assert answers[:3] == [
        [Receipt(SequenceToken(0))],
        [Receipt(SequenceToken(1))],
        [Receipt(SequenceToken(1), duplicate=True)],
    ]
    assert isinstance(answers[3], SequenceConflict)
    assert answers[4:] == [[Receipt(SequenceToken(2))], [Receipt(None, duplicate=True)]]
    assert await adapter.bounds(0) == Bounds(0, 3)


async def test_producers_are_independent_of_each_other(open_log: OpenLog):
    adapter, other = await open_log(), await open_log()
    await adapter.enqueue(batches(), sequence=number(7, 0, "p"))
    await other.enqueue(batches(), sequence=number(1, 0, "q"))
    assert [await adapter.last_sequence(name) for name in ("p", "q", "r")] == [7, 1, 0]


async def test_handles_check_one_producer_together(open_log: OpenLog):
    adapter, other = await open_log(), await open_log()
    await adapter.enqueue(batches(), sequence=number(1, 0))
    [retry] = await other.enqueue(batches(), sequence=number(1, 0))
    assert retry.duplicate
    await other.enqueue(batches(), sequence=number(2, 1))
    assert await adapter.bounds(0) == Bounds(0, 2)


@pytest.mark.parametrize(
    "sequence",
    [(1, 1), (0, 0), (1, -1), (1 << 63, 0), (1, 0, ""), (1, 0, "ä" * 300)],
)
async def test_a_sequence_that_cannot_be_stored_is_refused(open_log: OpenLog, sequence: Any):
    adapter = await open_log()
    with pytest.raises(InvalidArgument):
        await adapter.enqueue(batches(), sequence=number(*sequence))


def test_producers_that_have_long_been_silent_are_forgotten(tmp_path: Path):
    environment = acquire(tmp_path / "log", LogOptions(), "tests", 1)
    now_us = time.time_ns() // 1000
    with environment.writing() as changes:
        for index in range(2500):
            age_s = PRODUCER_AGE_S + 60 if index % 2 else 60
            changes.put_producer(b"%05d" % index, ProducerRow(1, now_us - age_s * 1_000_000, []))
    after, rounds = expire_producers(environment, b""), 1
    while after:
        after, rounds = expire_producers(environment, after), rounds + 1
    with environment.reading() as snapshot:
        left = [key for key, _ in snapshot.producers(b"")]
    release(environment)
    assert left == [b"%05d" % index for index in range(0, 2500, 2)]
    assert rounds == 3
