"""The delivery edge: fair turns for actors whose members' sending takes time, slow connections, no lost wake-ups."""

import asyncio
import logging
import random

import pytest

from headrace import EventBatch, RetryPolicy
from headrace.agents import Edge, Member
from headrace.agents.cursor import CursorState
from headrace.agents.delivery.edge import (
    FRAME_WORTH,
    FRAMES_BYTES,
    MESSAGE_S,
    MODEST_S,
    PARTS_EVENTS,
    QUOTA_S,
    STALLED_S,
    WINDOW,
    DeliveryActor,
)
from headrace.streams.frames import split
from tests.simulation.deliveries import stream
from tests.simulation.groups import PLENTY, SimulatedGroup, indexes
from tests.simulation.virtual_time import virtual_time

RESTLESS = RetryPolicy(max_attempts=1_000_000, max_elapsed_s=1e9, initial_delay_s=0.0)


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace.agents")


class Clock:
    """The processor's time, which passes only when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for name in ("edge.perf_counter", "edge.thread_time", "group_delivery.perf_counter"):
            monkeypatch.setattr(f"headrace.agents.delivery.{name}", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Crowd:
    """An actor whose members always have more events to get. A message takes `pace_s`."""

    def __init__(self, edge: Edge, clock: Clock, name: str, members: int, pace_s: float, cost_s: float = 1e-5) -> None:
        self.edge = edge
        self.clock = clock
        self.pace_s = pace_s
        self.cost_s = cost_s
        self.messages = 0
        self.waited: list[float] = []
        """How long each message waited until it could go, in seconds."""
        self.wanted_at: float | None = None
        self.on = True
        self.actor = DeliveryActor(name, self)
        self.members = [Member(f"{name}{number}", 10.0) for number in range(members)]
        for member in self.members:
            member.on_outbox = lambda member=member: self._send(member)

    def wake(self) -> None:
        self.edge.wake(self.actor)

    def turn(self, ends: float) -> bool:
        for member in [member for member in self.members if not member.busy]:
            if not self.edge.may_send():
                return True
            self.clock.now += self.cost_s
            self.edge.put(member, b"x")
            if self.clock.now >= ends:
                return True
        return False

    def _send(self, member: Member) -> None:
        self.messages += 1
        loop = asyncio.get_running_loop()
        loop.call_soon(member.collect)
        loop.call_later(self.pace_s, self._sent, member)

    def _sent(self, member: Member) -> None:
        if not self.edge.sent(member) and self.on:
            self.wake()


# ---- turns ---------------------------------------------------------------------------------------------------------


async def _messages(crowds: list[Crowd], seconds: float = 2.0) -> list[int]:
    for crowd in crowds:
        crowd.wake()
    await asyncio.sleep(seconds)
    for crowd in crowds:
        crowd.on = False
    return [crowd.messages for crowd in crowds]


@virtual_time
async def test_one_consumer_beside_a_crowd_gets_what_it_would_get_alone() -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        (alone,) = await _messages([Crowd(Edge(), clock, "alone", 1, 0.001)])
        edge = Edge()
        one, many = Crowd(edge, clock, "one", 1, 0.001), Crowd(edge, clock, "many", 200, 0.001)
        others, beside = await _messages([many, one])
        assert beside > 0.8 * alone
        assert others > 0.8 * alone


@virtual_time
async def test_a_crowd_makes_room_while_somebody_takes_little_and_only_then() -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock, edge = Clock(patch), Edge()
        many, one = Crowd(edge, clock, "many", 200, 0.001), Crowd(edge, clock, "one", 1, 0.0005)
        one.on = False
        many.wake()
        sent: list[int] = []
        for wakes in (0, 10, 0):
            await asyncio.sleep(MODEST_S)
            before = many.messages
            for _ in range(wakes):
                one.wake()
                await asyncio.sleep(MODEST_S / 2)
            await asyncio.sleep(0 if wakes else MODEST_S)
            sent.append(round((many.messages - before) / (wakes / 2 or 1)))
        alone, beside, after = sent
        assert one.messages == 10
        assert beside < 0.4 * alone
        assert after == pytest.approx(alone, rel=0.01)


@virtual_time
async def test_crowds_of_different_sizes_get_the_same() -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock, edge = Clock(patch), Edge()
        crowds = [Crowd(edge, clock, str(size), size, 0.001) for size in (10, 100, 1000)]
        shares = await _messages(crowds)
        assert max(shares) < 1.1 * min(shares)


@virtual_time
async def test_who_takes_longer_to_decide_gets_fewer_turns() -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock, edge = Clock(patch), Edge()
        cheap = Crowd(edge, clock, "cheap", 100, 0.001)
        dear = Crowd(edge, clock, "dear", 100, 0.001, cost_s=10 * MESSAGE_S)
        shares = await _messages([cheap, dear])
        assert 8 < shares[0] / shares[1] < 12


@virtual_time
async def test_messages_that_wait_behind_another_are_charged_too() -> None:
    """Whoever's members are all busy puts into their outboxes: that is work to come, and not free."""
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch)
        edge = Edge()
        member, idle = Member("busy", 10.0), Member("idle", 10.0)

        class Busy:
            def turn(self, ends: float) -> bool:
                member.collect()
                edge.put(member, b"x")
                edge.put(member, b"y")
                return False

        actor = DeliveryActor("busy", Busy())
        for _ in range(10):
            edge.wake(actor)
            await asyncio.sleep(0.001)
        assert actor.served_s == pytest.approx(10 * MESSAGE_S)
        assert idle.busy is False


@virtual_time
async def test_a_turn_ends_when_its_time_is_up_though_one_member_could_take_more() -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        async with SimulatedGroup() as circle:
            consumer = circle.consumer("c")
            put = circle.edge.put

            def slowly(member: Member, frame: bytes) -> None:
                clock.now += QUOTA_S / 5
                put(member, frame)

            patch.setattr(circle.edge, "put", slowly)
            circle.lane.publish_all([(str(number), ["x"]) for number in range(100)])
            await asyncio.sleep(0)
            assert len(circle.delivery.parcels) == 5
            await circle.rest()
            assert len(consumer.inbox) == 100


@virtual_time
async def test_a_delivery_that_is_stopped_has_no_turn_any_more() -> None:
    async with SimulatedGroup() as circle:
        consumer = circle.consumer("c")
        circle.publish("a", "0")
        await circle.stop()
        circle.publish("b", "1")
        circle.group.line.add(consumer.member)
        await circle.rest()
        assert "1" not in consumer.waiting


# ---- slow connections ----------------------------------------------------------------------------------------------


@virtual_time
async def test_stalled_members_do_not_close_the_window() -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock, edge = Clock(patch), Edge()
        stalled = Crowd(edge, clock, "stalled", 50 * WINDOW, 1e6)
        quick = Crowd(edge, clock, "quick", 1, 0.0001)
        stalled.wake()
        await asyncio.sleep(50 * STALLED_S + 0.1)
        assert stalled.messages == 50 * WINDOW
        (messages,) = await _messages([quick], 1.0)
        assert messages > 0.9 * 1.0 / 0.0001


@virtual_time
async def test_slow_members_do_not_close_the_window() -> None:
    """Each of them is slow, but many messages are under way all the time."""
    with pytest.MonkeyPatch.context() as patch:
        clock, edge = Clock(patch), Edge()
        slow = Crowd(edge, clock, "slow", 500, 10 * STALLED_S)
        quick = Crowd(edge, clock, "quick", 1, 0.0001)
        slow.wake()
        await asyncio.sleep(1.0)
        (messages,) = await _messages([quick], 5.0)
        assert messages > 500, "one that is stalled leaves the window after STALLED_S at the latest"


# ---- wake-ups ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_everything_that_is_ready_is_handed_out_where_somebody_can_take_it(seed: int) -> None:
    rng = random.Random(seed)
    virtual_time(_wakes_everybody)(rng)


async def _wakes_everybody(rng: random.Random) -> None:
    edge = Edge()
    circles = [SimulatedGroup(queues=rng.choice((1, 3)), edge=edge, retry=RESTLESS) for _ in range(rng.choice((1, 3)))]
    for circle in circles:
        for name in range(rng.randint(1, 5)):
            circle.consumer(str(name), rng.choice((0, 1, PLENTY)), PLENTY, pace_s=rng.choice((0, 0, 0.001, 0.02)))
    for _ in range(40):
        for _ in range(rng.randint(1, 5)):
            _happens(rng, rng.choice(circles))
        await asyncio.sleep(rng.choice((0.0, 0.001, 0.01)))
    await asyncio.sleep(10.0)
    for circle in circles:
        available = [member for member in circle.group.members.values() if member.credit_events > 100]
        left = [
            c for lane in circle.lanes for c in lane.delivery.progress.cursors.values() if c.state is CursorState.READY
        ]
        assert not (available and left)
    await asyncio.gather(*(circle.stop() for circle in circles))


def _happens(rng: random.Random, circle: SimulatedGroup) -> None:
    consumer = rng.choice(list(circle.consumers.values()))
    here = circle.group.members.get(consumer.name) is consumer.member and consumer.member.connected
    roll = rng.random()
    if roll < 0.4:
        lane = rng.choice(circle.lanes)
        lane.publish_all([(str(rng.randrange(50)), ["x"] * rng.choice((1, 5))) for _ in range(rng.choice((1, 30)))])
    elif not here:
        consumer.connect(rng.choice((0, 1, 5, PLENTY)), PLENTY)
    elif roll < 0.5:
        consumer.grant(rng.choice((1, 5, PLENTY)), 0)
    elif roll < 0.9:
        for each in consumer.take():
            if rng.random() < 0.8:
                consumer.ack(each)
            else:
                consumer.reject(each, rng.choice(indexes(each)))
    elif roll < 0.95:
        consumer.disconnect()
    else:
        consumer.leave()


# ---- frames --------------------------------------------------------------------------------------------------------


@virtual_time
async def test_large_frames_are_made_once_for_everybody_within_bounds() -> None:
    edge = Edge()
    small = EventBatch.of(stream("a"), [b"x"])
    large = [EventBatch.of(stream("a"), [b"x" * (FRAMES_BYTES // 10)]) for _ in range(30)]
    for offset, batch in enumerate(large):
        batch.offset = offset
    assert edge.frame(large[0], 0) is edge.frame(large[0], 0)
    assert edge.frame(large[0], 1) is not edge.frame(large[0], 0)
    (delivered,) = split(edge.frame(large[0], 1))[0]
    assert (delivered.batch, delivered.queue) == (large[0], 1)
    assert len(small.encoded) < FRAME_WORTH
    edge.frame(small, 0)
    for batch in large:
        edge.frame(batch, 0)
    assert sum(map(len, edge._frames.values())) == edge._frames_bytes <= FRAMES_BYTES  # pyright: ignore[reportPrivateUsage]


@virtual_time
async def test_a_batch_that_goes_out_in_parts_is_read_once_within_bounds() -> None:
    edge = Edge()
    batches = [EventBatch.of(stream("a"), [b"x"] * (PARTS_EVENTS // 10)) for _ in range(30)]
    for offset, batch in enumerate(batches):
        batch.offset = offset
        for indexes_ in ([0, 1], [5, 9]):
            assert EventBatch.decode(edge.part(batch, 0, indexes_)).payloads() == [b"x", b"x"]
    assert len(edge._parts) == 10  # pyright: ignore[reportPrivateUsage]
    assert edge._parts_events == sum(parts.count for parts in edge._parts.values()) <= PARTS_EVENTS  # pyright: ignore[reportPrivateUsage]
