"""Subscriptions, dead letters and gaps of a remote provider."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace import (
    DefinitionConflict,
    Event,
    InvalidArgument,
    NotFound,
    OnFailure,
    RetryPolicy,
    Selector,
    Start,
    StreamId,
    SubscriptionDefinition,
    Unavailable,
)
from headrace.client.client import Client
from headrace.silo.provider import Provider
from tests.client.silos import SiloProcess, Silos

S = StreamId("n", "k")
ONCE = RetryPolicy(max_attempts=1)


def defined(name: str, **options: object) -> SubscriptionDefinition:
    return SubscriptionDefinition(name=name, selector=Selector("n/*"), **options)  # type: ignore[arg-type]


async def test_subscriptions_are_made_found_moved_and_deleted(silo: SiloProcess):
    one, two = defined("one", start=Start.earliest(), retry=ONCE), defined("two", on_failure=OnFailure.PAUSE)
    async with Client(silo.address) as client:
        assert await client.create_subscription(one)
        assert not await client.create_subscription(one)
        with pytest.raises(DefinitionConflict):
            await client.create_subscription(defined("one"))
        assert await client.create_subscription(two)
        assert await client.subscriptions() == [one, two]

        await client.stream("n", "k").publish([b"0", b"1"])
        state = await client.subscription("one")
        assert (state.definition, state.consumers) == (one, [])
        assert sum(queue.end_offset - queue.watermark for queue in state.progress) == 1
        await client.seek("one", Start.latest())
        await client.caught_up("one")
        state = await client.subscription("one")
        assert all(queue.next_offset == queue.end_offset for queue in state.progress)
        await client.seek("one", "earliest")
        state = await client.subscription("one")
        assert sum(queue.end_offset - queue.watermark for queue in state.progress) == 1

        await client.delete_subscription("one")
        assert await client.subscriptions() == [two]
        for missing in (
            client.delete_subscription("one"),
            client.subscription("one"),
            client.seek("one", "latest"),
            client.caught_up("one"),
            client.resume("one", S),
            client.gaps("one"),
            client.dead_letters("one"),
            client.redrive("one"),
        ):
            with pytest.raises(NotFound):
                await missing
        with pytest.raises(InvalidArgument):
            await client.seek("two", "nonsense")


async def left_behind(data: Path, events: list[bytes | Event]) -> None:
    """Subscriptions `letters`, whose handler fails and gives everything up, and `paused`, which waits."""

    async def fail(event: Event) -> None:
        raise ValueError(event.payload.decode())

    async with Provider.open(data) as provider:
        letters = await provider.subscribe("letters", "n/*", fail, start=Start.earliest(), retry=ONCE)
        options: dict[str, Any] = {"start": Start.earliest(), "retry": ONCE, "on_failure": OnFailure.PAUSE}
        paused = await provider.subscribe("paused", "n/*", fail, **options)
        await provider.stream(S).publish(events)
        await letters.caught_up()
        await paused.caught_up()


async def test_dead_letters_are_listed_redriven_and_deleted(silo: SiloProcess):
    silo.stop()
    await left_behind(silo.data, [Event(b"%d" % number, id="i", headers={"a": "b"}) for number in range(7)])
    silo.start()
    async with Client(silo.address) as client:
        letters = await client.dead_letters("letters")
        assert [letter.payload for letter in letters] == [b"%d" % number for number in range(7)]
        first = letters[0]
        assert (first.stream, first.event_id, dict(first.headers), first.attempts) == (S, "i", {"a": "b"}, 1)
        assert (first.provider, first.subscription) == ("default", "letters")
        assert await client.dead_letters("letters", limit=3) == letters[:3]
        assert await client.dead_letters() == letters
        assert (await client.subscription("letters")).dead_letters == 7
        assert await client.dead_letters("letters", after_id=letters[2].id) == letters[3:]

        assert await client.redrive("letters", [letters[0].id, letters[1].id]) == 2
        assert [letter.redrive for letter in await client.dead_letters("letters")] == [True] * 2 + [False] * 5
        assert await client.redrive("letters", []) == 0
        assert await client.redrive("letters", [-1, 0, 1 << 70]) == 0
        assert len(await client.dead_letters("letters", after_id=-7)) == 7
        assert await client.redrive("letters") == 7

        assert await client.delete_dead_letters("letters", [letters[0].id]) == 1
        assert await client.delete_dead_letters("letters", []) == 0
        assert await client.delete_dead_letters("letters") == 6
        assert await client.dead_letters("letters") == []
        assert await client.gaps("letters") == []


async def test_a_paused_stream_is_resumed(silo: SiloProcess):
    silo.stop()
    await left_behind(silo.data, [b"0"])
    silo.start()
    async with Client(silo.address) as client:
        queues = (await client.subscription("paused")).progress
        assert [dict(queue.paused) for queue in queues if queue.streams_paused] == [{S: "ValueError: 0"}]
        assert not await client.resume("paused", StreamId("n", "other"))
        assert await client.resume("paused", S)
        assert not await client.resume("paused", S)


async def test_gaps_are_listed(silos: Silos, tmp_path: Path):
    async def skip(event: Event) -> None:
        raise ValueError

    async with Provider.open(tmp_path / "d") as provider:
        options: dict[str, Any] = {"start": Start.earliest(), "retry": ONCE, "on_failure": OnFailure.SKIP}
        subscription = await provider.subscribe("s", "n/*", skip, **options)
        await provider.stream(S).publish([b"0", b"1"])
        await subscription.caught_up()
    silo = silos()
    async with Client(silo.address) as client:
        gaps = await client.gaps("s")
        assert (await client.subscription("s")).gaps == len(gaps)
    assert {gap.stream for gap in gaps} == {S}
    assert (gaps[0].provider, gaps[0].subscription) == ("default", "s")


async def test_a_lost_answer_does_not_make_a_deletion_fail(silo: SiloProcess):
    async with Client(silo.address) as client:
        await client.create_subscription(defined("s"))
        silo.kill()
        deleting = asyncio.create_task(client.delete_subscription("s"))
        await asyncio.to_thread(silo.start)
        await deleting
        assert await client.subscriptions() == []


async def test_calls_wait_for_a_silo_that_comes_back_and_give_up_after_a_while(silo: SiloProcess):
    async with Client(silo.address, timeout_s=0.3) as client:
        silo.kill()
        with pytest.raises(Unavailable, match="no silo answers"):
            await client.subscriptions()
        with pytest.raises(Unavailable, match="no silo answers"):
            await client.caught_up("s")


async def test_waiting_to_be_caught_up_goes_on_over_a_restart(silo: SiloProcess):
    async with Client(silo.address) as client:
        await client.create_subscription(defined("s"))
        await client.publish(S, b"0")
        waiting = asyncio.create_task(client.caught_up("s"))
        await asyncio.to_thread(silo.stop)
        await asyncio.to_thread(silo.start)
        assert not waiting.done()
        await client.seek("s", "latest")
        await waiting
