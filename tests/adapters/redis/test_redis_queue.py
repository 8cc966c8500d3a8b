"""What a queue in Redis does, in order of an event's life. The server is real; the clock is the test's."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from redis import Redis

from headrace import InvalidArgument
from headrace.adapters.redis import PushedEvent, RedisOptions, RedisQueue, TakenEvent
from tests.adapters.redis.looking import Clock, check_agreement
from tests.servers import redis_and_valkey as redis_server

__all__ = ("redis_server",)


async def bodies(queue: RedisQueue, limit: int = 100, timeout_s: float = 30.0) -> list[str]:
    return [taken.body.decode() for taken in await queue.pop(limit, timeout_s=timeout_s)]


async def one(queue: RedisQueue, timeout_s: float = 30.0) -> TakenEvent:
    (taken,) = await queue.pop(1, timeout_s=timeout_s)
    return taken


# ---- order -----------------------------------------------------------------------------------------------------------


async def test_events_of_one_priority_come_as_they_were_pushed(timed: RedisQueue, clock: Clock) -> None:
    """All in the same millisecond, and in several calls."""
    await timed.push_many([PushedEvent(b"%d" % number) for number in range(40)])
    await timed.push_many([PushedEvent(b"%d" % number) for number in range(40, 60)])
    assert await bodies(timed) == [str(number) for number in range(60)]


async def test_a_higher_priority_goes_first_among_all_that_is_due(timed: RedisQueue, clock: Clock) -> None:
    """However much later it came: priority is no tie-breaker within a millisecond."""
    for priority in (0, 99, 1, 50):
        await timed.push(b"%d" % priority, priority=priority)
        clock.advance(3600)
    assert await bodies(timed) == ["99", "50", "1", "0"]


async def test_an_urgent_event_goes_before_many_that_are_not(timed: RedisQueue, clock: Clock) -> None:
    await timed.push_many([PushedEvent(b"low", delay_s=10)] * 2000)
    await timed.push(b"high", delay_s=11, priority=1)
    clock.advance(11)
    assert await bodies(timed, 2) == ["high", "low"]


async def test_an_urgent_event_that_is_not_due_holds_up_no_other_event(timed: RedisQueue, clock: Clock) -> None:
    await timed.push(b"urgent", priority=99, delay_s=1e6)
    await timed.push(b"now")
    taken = await one(timed)
    assert taken.body == b"now"
    await timed.acknowledge(taken)
    clock.advance(1e6)
    assert await bodies(timed) == ["urgent"]


@pytest.mark.parametrize("priority", [-1, 100, 1.5, True])
async def test_a_priority_that_is_none_is_refused(timed: RedisQueue, priority: int) -> None:
    with pytest.raises(InvalidArgument, match="from 0 to 99"):
        await timed.push(b"x", priority=priority)


@pytest.mark.parametrize("delay_s", [-0.001, float("nan"), float("inf"), 1e12])
async def test_a_delay_that_is_none_is_refused(timed: RedisQueue, delay_s: float) -> None:
    with pytest.raises(InvalidArgument, match="a delay is"):
        await timed.push(b"x", delay_s=delay_s)


# ---- time ------------------------------------------------------------------------------------------------------------


async def test_an_event_comes_when_it_is_due_and_not_a_millisecond_earlier(timed: RedisQueue, clock: Clock) -> None:
    await timed.push(b"x", delay_s=20)
    clock.advance(19.999)
    assert await bodies(timed) == []
    clock.advance(0.001)
    assert await bodies(timed) == ["x"]


async def test_a_part_of_a_millisecond_brings_nothing_early(timed: RedisQueue, clock: Clock) -> None:
    clock.advance(0.0007)
    await timed.push(b"x", delay_s=1)
    clock.advance(0.9995)
    assert await bodies(timed) == []
    clock.advance(0.001)
    await one(timed, timeout_s=1)
    clock.advance(0.9999)
    assert await bodies(timed) == []
    clock.advance(0.001)
    assert await bodies(timed) == ["x"]


async def test_unacknowledged_event_comes_again_after_its_timeout(timed: RedisQueue, clock: Clock) -> None:
    """No process watches for it: the next consumer that pops takes it back."""
    await timed.push_many([PushedEvent(b"%d" % number) for number in range(10)])
    first = await timed.pop(10, timeout_s=1)
    clock.advance(0.999)
    assert await bodies(timed) == []
    clock.advance(0.001)
    again = await timed.pop(10, timeout_s=1)
    assert [taken.id for taken in again] == [taken.id for taken in first]
    assert {taken.claim.attempts for taken in again} == {2}


async def test_redelivered_event_keeps_its_priority_and_its_place(timed: RedisQueue, clock: Clock) -> None:
    await timed.push_many([PushedEvent(b"a"), PushedEvent(b"b"), PushedEvent(b"urgent", priority=5)])
    assert await bodies(timed, 2, timeout_s=1) == ["urgent", "a"]
    clock.advance(5)
    await timed.push(b"c")
    assert await bodies(timed) == ["urgent", "a", "b", "c"]


async def test_a_timeout_can_be_moved(timed: RedisQueue, clock: Clock) -> None:
    await timed.push(b"x")
    taken = await one(timed, timeout_s=1)
    assert await timed.extend(taken, 10)
    clock.advance(9.9)
    assert await bodies(timed) == []
    assert await timed.extend(taken, 0)
    assert (await one(timed)).claim.attempts == 2
    assert not await timed.extend(taken, 10)


async def test_a_delay_can_be_changed_while_it_waits(timed: RedisQueue, clock: Clock) -> None:
    await timed.push(b"x", id="x", delay_s=20, priority=7)
    assert await timed.change_delay("x", 1)
    clock.advance(1)
    taken = await one(timed)
    assert taken.claim.priority == 7
    assert not await timed.change_delay("x", 1), "it is claimed"
    assert not await timed.change_delay("nobody", 1)


async def test_an_event_is_given_back_at_once_where_it_stood_or_later(timed: RedisQueue, clock: Clock) -> None:
    await timed.push_many([PushedEvent(b"a"), PushedEvent(b"b")])
    assert await timed.release(await one(timed))
    assert await timed.release(taken := await one(timed), delay_s=5)
    assert taken.body == b"a"
    assert await bodies(timed) == ["b"]
    clock.advance(5)
    assert (await one(timed)).claim.attempts == 3


async def test_a_clock_that_is_set_back_gives_no_position_twice(timed: RedisQueue, clock: Clock) -> None:
    await timed.push(b"a")
    clock.advance(-1000)
    await timed.push(b"b")
    clock.advance(1000)
    first, second = await timed.peek(10)
    assert [first.body, second.body] == [b"b", b"a"]
    assert first.id > second.id


# ---- claims ----------------------------------------------------------------------------------------------------------


async def test_acknowledged_event_is_gone(timed: RedisQueue, clock: Clock, direct: Redis) -> None:
    await timed.push_many([PushedEvent(b"%d" % number) for number in range(10)])
    assert [entry.body for entry in await timed.peek(10)] == [b"%d" % number for number in range(10)]
    taken = await timed.pop(10, timeout_s=1)
    assert await timed.acknowledge(*taken) == 10
    assert await timed.acknowledge(*taken) == 0
    clock.advance(100)
    assert await bodies(timed) == []
    assert check_agreement(direct, timed.shards[0].keys) == {"waiting": set(), "claimed": set(), "held": set()}


async def test_the_acknowledgement_of_a_claim_that_is_over_is_refused(
    timed: RedisQueue, clock: Clock, direct: Redis
) -> None:
    """Else a slow consumer would delete an event that another consumer is working on."""
    await timed.push(b"x")
    slow = await one(timed, timeout_s=1)
    clock.advance(2)
    other = await one(timed, timeout_s=10)
    assert other.id == slow.id
    assert await timed.acknowledge(slow) == 0
    assert not await timed.release(slow)
    assert not await timed.extend(slow, 100)
    assert len(check_agreement(direct, timed.shards[0].keys)["claimed"]) == 1
    assert await timed.acknowledge(other) == 1


async def test_a_late_acknowledgement_counts_if_no_other_consumer_has_the_event(
    timed: RedisQueue, clock: Clock
) -> None:
    await timed.push(b"x")
    taken = await one(timed, timeout_s=1)
    clock.advance(10)
    assert await timed.acknowledge(taken) == 1


async def test_some_claims_of_a_call_may_be_over(timed: RedisQueue, clock: Clock) -> None:
    await timed.push_many([PushedEvent(b"a"), PushedEvent(b"b"), PushedEvent(b"c")])
    a, b, c = await timed.pop(3)
    await timed.release(b)
    assert await timed.shards[0].acknowledge([(each.id, each.claim.token) for each in (a, b, c)]) == [True, False, True]


async def test_pop_returns_present_events_and_does_not_wait_for_more(queue: RedisQueue) -> None:
    await queue.push_many([PushedEvent(b"a"), PushedEvent(b"b"), PushedEvent(b"c")])
    async with asyncio.timeout(10):
        assert len(await queue.pop(10, wait_s=3600)) == 3


async def test_peek_shows_the_events_that_pop_returns(timed: RedisQueue, clock: Clock) -> None:
    await timed.push_many([PushedEvent(b"%d" % n, priority=n % 3, delay_s=float(n % 4)) for n in range(40)])
    clock.advance(2)
    peeked = await timed.peek(40)
    assert len(peeked) == 30, "a quarter is not due"
    assert [(taken.id, taken.body) for taken in await timed.pop(40)] == [(entry.id, entry.body) for entry in peeked]
    assert await timed.peek(40) == []


async def test_pop_takes_no_more_than_it_is_asked_for(timed: RedisQueue, clock: Clock) -> None:
    await timed.push_many([PushedEvent(b"%d" % number, priority=number % 3) for number in range(20)])
    assert [len(await timed.pop(limit)) for limit in (1, 7, 100)] == [1, 7, 12]


async def test_pop_stops_at_so_many_bytes(timed: RedisQueue, clock: Clock) -> None:
    await timed.push_many([PushedEvent(b"x" * 100)] * 10)
    popped = await timed.shards[0].pop(10, 1, max_bytes=250)
    assert len(popped.claims) == 3
    assert len((await timed.shards[0].pop(10, 1, max_bytes=1)).claims) == 1


# ---- ids -------------------------------------------------------------------------------------------------------------


async def test_an_event_is_stored_once_while_one_has_its_id(timed: RedisQueue, clock: Clock) -> None:
    assert await timed.ensure(b"first", id="x")
    assert not await timed.ensure(b"second", id="x")
    taken = await one(timed)
    assert not await timed.ensure(b"third", id="x"), "it is claimed, and so still there"
    assert taken.body == b"first"
    await timed.acknowledge(taken)
    assert await timed.ensure(b"fourth", id="x")


async def test_an_event_takes_the_place_of_one_with_its_id(timed: RedisQueue, clock: Clock, direct: Redis) -> None:
    await timed.push(b"old", id="x", priority=9)
    taken = await one(timed)
    await timed.push(b"new", id="x")
    assert await timed.acknowledge(taken) == 0
    assert (await one(timed)).body == b"new"
    await timed.push_many([PushedEvent(b"a", "y"), PushedEvent(b"b", "y")])
    assert await bodies(timed) == ["b"]
    check_agreement(direct, timed.shards[0].keys)


async def test_an_id_that_is_a_time_is_none_that_the_queue_gives(timed: RedisQueue, clock: Clock) -> None:
    """The queue's own ids are made from the time in microseconds."""
    at = round(clock.now_s * 1e6)
    for offset in range(10):
        await timed.push(b"%d" % offset, id=f"{at + offset + 10:016}")
    await timed.push_many([PushedEvent(b"x")] * 10)
    assert sorted(await bodies(timed)) == [*"0123456789", *"xxxxxxxxxx"]


async def test_an_id_that_the_queue_may_give_is_refused(timed: RedisQueue) -> None:
    await timed.push(b"x")
    (given,) = await timed.peek(1)
    with pytest.raises(InvalidArgument, match="choose one"):
        await timed.push(b"y", id=given.id)
    with pytest.raises(InvalidArgument, match="choose one"):
        await timed.ensure(b"y", id=given.id)
    await timed.push(b"z", id="@home")
    assert await timed.remove(given.id)


async def test_an_event_is_shown_wherever_it_is(timed: RedisQueue, clock: Clock) -> None:
    await timed.push(b"x", id="x", delay_s=5, priority=3)
    found = await timed.get("x")
    assert found is not None
    assert (found.body, found.state, found.priority, found.attempts) == (b"x", "waiting", 3, 0)
    assert found.due_ms == round((clock.now_s + 5) * 1000)
    clock.advance(5)
    await one(timed)
    found = await timed.get("x")
    assert found is not None
    assert (found.state, found.priority, found.attempts) == ("claimed", 3, 1)
    assert await timed.get("y") is None


async def test_removed_event_leaves_nothing_in_any_state(timed: RedisQueue, clock: Clock, direct: Redis) -> None:
    await timed.push_many(
        [PushedEvent(b"x", "ready"), PushedEvent(b"x", "delayed", 10.0), PushedEvent(b"x", "claimed", 0.0, 9)]
    )
    await one(timed)
    for name in ("ready", "delayed", "claimed"):
        assert await timed.remove(name)
        assert not await timed.remove(name)
        assert await timed.get(name) is None
    assert not any(check_agreement(direct, timed.shards[0].keys).values())


async def test_sizes_count_queued_delayed_and_unacknowledged_events(timed: RedisQueue, clock: Clock) -> None:
    await timed.push_many([PushedEvent(b"x", priority=n % 4, delay_s=10.0 * (n % 2)) for n in range(10)])
    await timed.pop(2)
    size = await timed.size()
    assert (size.ready, size.delayed, size.claimed, size.held, size.waiting) == (3, 5, 2, 0, 8)
    await timed.clear()
    size = await timed.size()
    assert (size.waiting, size.claimed) == (0, 0)


async def test_of_many_concurrent_ensure_calls_one_stores_the_event(queue: RedisQueue, options: RedisOptions) -> None:
    async with RedisQueue.open("q", options) as other:
        stored = await asyncio.gather(*(each.ensure(b"x", id="x") for each in [queue, other] * 10))
    assert sorted(stored) == [False] * 19 + [True]
    assert (await queue.size()).ready == 1


async def test_a_claim_from_before_a_loss_is_none_of_after_it(queue: RedisQueue, direct: Redis) -> None:
    """A server that begins anew, or from an old copy, counts its claims on, not again."""
    await queue.push(b"old", id="x")
    before = await one(queue)
    direct.delete(*queue.shards[0].keys)
    await queue.push(b"new", id="x")
    after = await one(queue)
    assert await queue.acknowledge(before) == 0
    assert await queue.acknowledge(after) == 1


async def test_after_clearing_old_claims_are_over(timed: RedisQueue, clock: Clock) -> None:
    await timed.push(b"x", id="x")
    taken = await one(timed)
    await timed.clear()
    await timed.push(b"y", id="x")
    await one(timed)
    assert await timed.acknowledge(taken) == 0


# ---- waiting ---------------------------------------------------------------------------------------------------------


async def test_waiting_pop_is_woken_by_a_push(queue: RedisQueue) -> None:
    popping = asyncio.create_task(queue.pop(1, wait_s=60))
    await asyncio.sleep(0)
    await queue.push(b"x")
    async with asyncio.timeout(4):  # sooner than a wait for a bell ends by itself
        (taken,) = await popping
    assert taken.body == b"x"


async def test_waiting_pop_is_woken_by_an_event_that_becomes_due(queue: RedisQueue) -> None:
    await queue.push(b"x", delay_s=0.2)
    async with asyncio.timeout(4):
        (taken,) = await queue.pop(1, wait_s=60, timeout_s=0.2)
        assert taken.body == b"x"
        (returned,) = await queue.pop(1, wait_s=60)
    assert returned.claim.attempts == 2


async def test_an_event_that_is_due_earlier_than_the_one_waited_for_wakes(queue: RedisQueue) -> None:
    await queue.push(b"later", delay_s=3600)
    popping = asyncio.create_task(queue.pop(1, wait_s=60))
    await asyncio.sleep(0)
    await queue.push(b"sooner", delay_s=0.1)
    async with asyncio.timeout(4):
        assert [taken.body for taken in await popping] == [b"sooner"]


async def test_several_waiting_consumers_get_one_event_each(queue: RedisQueue) -> None:
    popping = [asyncio.create_task(queue.pop(1, wait_s=60)) for _ in range(5)]
    await asyncio.sleep(0)
    await queue.push_many([PushedEvent(b"%d" % number) for number in range(5)])
    async with asyncio.timeout(4):
        taken = [each for batch in await asyncio.gather(*popping) for each in batch]
    assert sorted(each.body for each in taken) == [b"%d" % number for number in range(5)]


async def test_waiting_asks_the_server_nothing(queue: RedisQueue, direct: Redis) -> None:
    stats = cast(Any, direct).info
    popping = asyncio.create_task(queue.pop(1, wait_s=60))
    async with asyncio.timeout(10):
        while not stats("clients")["blocked_clients"]:  # noqa: ASYNC110 (it is another process that sees it)
            await asyncio.sleep(0.01)
    before = stats("commandstats")["cmdstat_evalsha"]["calls"]
    await asyncio.sleep(0.5)
    assert stats("commandstats")["cmdstat_evalsha"]["calls"] == before
    await queue.push(b"x")
    await popping


async def test_nothing_comes_within_the_wait(queue: RedisQueue) -> None:
    began = asyncio.get_running_loop().time()
    assert await queue.pop(1, wait_s=0.3) == []
    assert asyncio.get_running_loop().time() - began >= 0.3


async def test_waiting_pop_can_be_cancelled_at_any_moment(queue: RedisQueue) -> None:
    for turns in range(60):
        popping = asyncio.create_task(queue.pop(1, wait_s=3600))
        for _ in range(turns % 30):
            await asyncio.sleep(0)
        popping.cancel()
        async with asyncio.timeout(4):
            await asyncio.gather(popping, return_exceptions=True)
        assert popping.cancelled()


async def test_concurrent_consumers_get_every_event_once(queue: RedisQueue) -> None:
    """Three producers in lists of ten, four consumers: no id twice, none missing."""

    async def produce(name: int) -> None:
        for start in range(0, 300, 10):
            await queue.push_many([PushedEvent(b"%d.%d" % (name, start + number)) for number in range(10)])

    async def consume() -> list[bytes]:
        mine: list[bytes] = []
        while taken := await queue.pop(100, wait_s=0.5):
            mine += [each.body for each in taken]
            assert await queue.acknowledge(*taken) == len(taken)
        return mine

    consumers = [asyncio.create_task(consume()) for _ in range(4)]
    await asyncio.gather(*(produce(name) for name in range(3)))
    received = [body for bodies in await asyncio.gather(*consumers) for body in bodies]
    assert sorted(received) == sorted(b"%d.%d" % (name, number) for name in range(3) for number in range(300))
