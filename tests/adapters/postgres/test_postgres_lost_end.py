"""A failover to a server that lacks the last commits: what is published after it is delivered."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from headrace import Event, Provider, SequenceToken, StreamId
from headrace.adapters.receiving import LOST_END
from headrace.silo.lost_positions import first_lost_offset
from headrace.streams.subscriptions import GapRecord
from tests.adapters.postgres.opening import ask, tables

STREAM = StreamId("orders", "1")
KEPT, READ, NEW = 5, 15, 4


def provider(
    data: Path, url: str, *, create: bool = False, poll_s: float = 0.05
) -> AbstractAsyncContextManager[Provider]:
    return Provider.open(data, adapter="postgres", queues=1, options={"url": url, "create": create, "poll_s": poll_s})


def lose_the_end(url: str) -> None:
    (table,) = tables(url)
    ask(url, f"DELETE FROM {table} WHERE first >= {KEPT}")
    ask(url, f"UPDATE headrace_queue SET next = {KEPT}, events = {KEPT}, time_us = (SELECT max(time_us) FROM {table})")


@pytest.mark.parametrize("noticed_first", [True, False])
async def test_what_is_published_after_a_failover_is_delivered(
    tmp_path: Path, postgres_url: str, *, noticed_first: bool
) -> None:
    """Also if the silo notices the loss only when new events are in the queue."""
    got: list[bytes] = []

    async def handle(event: Event) -> None:
        got.append(event.payload)

    async with provider(tmp_path, postgres_url, create=True, poll_s=0.05 if noticed_first else 0.5) as opened:
        reading = await opened.subscribe("all", "orders/*", handle)
        for number in range(READ):
            await opened.publish(STREAM, str(number).encode())
        await reading.caught_up()
        lose_the_end(postgres_url)
        if noticed_first:
            await has_fault(opened)
        for number in range(NEW):
            await opened.publish(STREAM, b"new %d" % number)
        await has_fault(opened)
    async with provider(tmp_path, postgres_url) as opened:
        reading = await opened.subscribe("all", "orders/*", handle)
        await reading.caught_up()
        gaps = await opened.gaps("all")
    assert got[READ:] == [b"new %d" % number for number in range(NEW)]
    assert {(gap.low.offset, gap.high.offset) for gap in gaps} == {(KEPT, READ)}


async def has_fault(opened: Provider) -> None:
    while not any(agent.state == "faulted" for agent in opened.manager.statistics()):  # noqa: ASYNC110 (faults do not notify)
        await asyncio.sleep(0.02)


def test_the_lowest_end_that_was_recorded_since_the_last_seek_counts() -> None:
    def gap(low: int, reason: str = LOST_END, at_us: int = 20, queue: int = 0) -> GapRecord:
        return GapRecord("default", "all", queue, None, SequenceToken(low), SequenceToken(15), reason, at_us)

    others = [gap(1, at_us=10), gap(2, reason="removed by retention"), gap(3, queue=1)]
    assert first_lost_offset([*others, gap(6), gap(5)], 0, 9, since_us=10) == 5
    assert first_lost_offset(others, 0, 9, since_us=10) == 9
