"""How subscriptions stand is the same by the control store and by a silo, as far as a silo tells it."""

import asyncio
from pathlib import Path

import pytest

from headrace import (
    Event,
    GapRecord,
    Mode,
    NotFound,
    Provider,
    RetryPolicy,
    Selector,
    SequenceToken,
    Start,
    StreamId,
    SubscriptionDefinition,
)
from headrace.pipeline.jobs.comparing import lost_ranges, without
from headrace.pipeline.jobs.subscription_snapshots import SubscriptionSnapshot, checkpoint_of, read_snapshots
from headrace.pipeline.place import ProviderPlace
from headrace.streams.states import QueueProgress
from headrace.streams.subscriptions import Checkpoint, StreamBehind, of_consumer
from tests.client.silos import SiloProcess

PAUSED = StreamId("n", "paused")


async def refuse(event: Event) -> None:
    if event.payload == b"bad":
        raise ValueError("bad")


async def fill(data: Path) -> None:
    async with Provider.open(data, queues=2) as provider:
        for number in range(10):
            await provider.stream("n", str(number)).publish([b"bad" if number == 3 else b"good"])
        policy = RetryPolicy(max_attempts=1)
        subscription = await provider.subscribe("s", "n/*", refuse, start=Start.earliest(), retry=policy)
        await subscription.caught_up()
        await subscription.close()
        gap = GapRecord("default", "s", 0, None, SequenceToken(0), SequenceToken(1), "planted", 1)
        await provider.store.add_gaps([gap])
        parent = SubscriptionDefinition(name="all", selector=Selector("n/*"), mode=Mode.BROADCAST)
        await provider.create_subscription(parent)
        await provider.ensure_subscription(of_consumer(parent, "c1"))


def test_a_silo_returns_the_snapshots_of_the_control_store(tmp_path: Path):
    silo = SiloProcess(tmp_path)
    asyncio.run(fill(tmp_path / "d"))
    stored = asyncio.run(read_snapshots(ProviderPlace.of({"data": str(tmp_path / "d")}), []))
    assert [one.name for one in stored] == ["all~c1", "s"]
    (reason,) = stored[1].letters.values()
    assert "ValueError: bad" in reason
    assert [gap.reason for gap in stored[1].gaps] == ["planted"]
    try:
        silo.start()
        place = ProviderPlace.of({"server": silo.address})
        assert asyncio.run(read_snapshots(place, ["s"])) == stored[1:]
        with pytest.raises(NotFound, match="no subscription 'other'"):
            asyncio.run(read_snapshots(place, ["other"]))
        with pytest.raises(NotFound, match="'all': no position of a consumer is known here"):
            asyncio.run(read_snapshots(place, ["all"]))
    finally:
        silo.kill()


def test_of_a_broadcast_subscription_its_consumers_are_meant(tmp_path: Path):
    asyncio.run(fill(tmp_path / "d"))
    found = asyncio.run(read_snapshots(ProviderPlace.of({"data": str(tmp_path / "d")}), ["all"]))
    assert [one.name for one in found] == ["all~c1"]


def progress(behind: int, **paused: str) -> QueueProgress:
    return QueueProgress(0, 20, 5, 30, behind, len(paused), {StreamId("n", key): why for key, why in paused.items()})


def test_streams_behind_that_a_silo_does_not_list_count_as_not_done():
    assert checkpoint_of(progress(0)._replace(watermark=20)) == Checkpoint(20)
    assert checkpoint_of(progress(2, paused="why")) == Checkpoint(5)
    assert checkpoint_of(progress(1, paused="why")) == Checkpoint(20, {PAUSED: StreamBehind(SequenceToken(5), "why")})


def snapshot(next_offset: int, *gaps: tuple[int, int]) -> SubscriptionSnapshot:
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"))
    records = [GapRecord("default", "s", 0, None, SequenceToken(a), SequenceToken(b), "", 1) for a, b in gaps]
    return SubscriptionSnapshot(definition, {0: Checkpoint(next_offset)}, {}, records)


@pytest.mark.parametrize(
    ("one", "start", "gone", "lost"),
    [
        (snapshot(0), 0, [(0, 10)], [(0, 9)]),
        (snapshot(10), 0, [(0, 10)], []),
        (snapshot(4), 0, [(0, 10)], [(4, 9)]),
        (snapshot(4), 6, [(0, 10)], [(6, 9)]),
        (snapshot(0, (0, 10)), 0, [(0, 10)], []),
        (snapshot(0, (2, 4), (3, 7)), 0, [(0, 10)], [(0, 1), (7, 9)]),
        (snapshot(0), 0, [(0, 2), (5, 6), (9, 4)], [(0, 1), (5, 5)]),
    ],
)
def test_removed_event_that_is_neither_done_nor_recorded_is_lost(
    one: SubscriptionSnapshot, start: int, gone: list[tuple[int, int]], lost: list[tuple[int, int]]
):
    found = [(each.first.offset, each.last.offset) for each in lost_ranges(one, [start], {0: gone})]
    assert found == lost


def test_a_range_without_nothing_is_whole():
    assert without((3, 5), []) == [(3, 5)]
    assert without((5, 5), [(1, 9)]) == []
