"""The provider: its refusals, and its handling of a log that lost its end."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import Busy, Event, InvalidArgument, Provider, RetryPolicy, SequenceToken, Start, StreamId


async def ignore(_: Event) -> None: ...


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (None, "publish bytes, str, Event, .* not None"),
        (5, "not 5"),
        ({"a": 1j}, "cannot encode"),
        ([1], "not 1"),
        ([], "at least one event"),
        (Event(b"", headers={"a": 1}), "'a': 1"),  # pyright: ignore[reportArgumentType]
    ],
)
async def test_invalid_event_is_refused(tmp_path: Path, events: Any, message: str) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        with pytest.raises(InvalidArgument, match=message):
            await provider.stream("orders", "42").publish(events)
        assert (await provider.adapter.bounds(0)).next == 0


@pytest.mark.parametrize("items", [[1], [("orders/42", b"x")], [(StreamId("orders", "42"), 5)], 5])
async def test_pairs_that_are_none_are_refused(tmp_path: Path, items: Any) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        with pytest.raises(InvalidArgument):
            await provider.publish_many(items)


async def test_a_stream_is_no_text(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        with pytest.raises(InvalidArgument, match="not to 'orders/42'"):
            await provider.publish("orders/42", b"x")  # pyright: ignore[reportArgumentType]


async def test_a_start_may_be_text(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        got: list[bytes] = []

        async def handler(event: Event) -> None:
            got.append(event.payload)

        await provider.stream("orders", "42").publish(b"before")
        subscription = await provider.subscribe("all", "orders/*", handler, start="earliest")
        await subscription.caught_up()
        assert got == [b"before"]
        with pytest.raises(InvalidArgument, match="is not a start"):
            await provider.subscribe("other", "orders/*", handler, start="nonsense")


async def test_a_pattern_does_not_go_to_a_token(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        subscription = await provider.subscribe("all", "orders/*", ignore)
        with pytest.raises(InvalidArgument, match="use a time"):
            await subscription.seek(Start.at(SequenceToken(0)))
        assert provider.manager.subscriptions.serving("all").definition.name == "all"


async def test_subscribing_twice_says_that_it_is_this_process(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        await provider.subscribe("all", "orders/*", ignore)
        with pytest.raises(Busy, match="this process"):
            await provider.subscribe("all", "orders/*", ignore)


async def test_closing_continues_if_its_caller_is_cancelled(tmp_path: Path) -> None:
    provider_at = Provider.open(tmp_path, queues=1)
    provider = await provider_at.__aenter__()
    release = asyncio.Event()

    async def handler(_: Event) -> None:
        await release.wait()

    await provider.subscribe("all", "orders/*", handler)
    await provider.stream("orders", "42").publish(b"x")
    await running(lambda: provider.statistics().subscriptions[0].in_flight == 1)
    closing = asyncio.create_task(provider.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    release.set()
    await provider.aclose()
    async with Provider.open(tmp_path) as again:
        checkpoint = (await again.store.checkpoints("default", "all"))[0]
        assert checkpoint.next_offset == 1


async def test_a_subscription_may_be_closed_again_also_after_it_was_deleted(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        subscription = await provider.subscribe("all", "orders/*", ignore)
        await subscription.close()
        await subscription.close()
        assert [each.name for each in await provider.subscriptions()] == ["all"]
        await subscription.delete()
        await subscription.close()


@pytest.mark.long
async def test_an_event_at_the_position_of_an_older_dead_letter_gets_its_own(tmp_path: Path) -> None:
    """The queues of the memory adapter do not outlive the process, but the dead letters do."""
    handled: list[tuple[StreamId | None, bytes]] = []

    async def run(payload: bytes, *, fail: bool = True) -> None:
        async def handler(event: Event) -> None:
            if fail:
                raise ValueError(f"cannot do {event.payload!r}")
            handled.append((event.stream, event.payload))

        async with Provider.open(tmp_path, adapter="memory", queues=1) as provider:
            retry = RetryPolicy(max_attempts=1)
            subscription = await provider.subscribe("s", "o/*", handler, start="earliest", retry=retry)
            if fail:
                await provider.publish(StreamId("o", payload.decode()), payload)
                await subscription.caught_up()
                return
            assert [(each.stream.key, each.payload, each.reason) for each in await provider.dead_letters("s")] == [
                ("first", b"first", "ValueError: cannot do b'first'"),
                ("second", b"second", "ValueError: cannot do b'second'"),
            ]
            assert await subscription.redrive() == 2
            while await provider.dead_letters("s"):
                pass

    await run(b"first")
    await run(b"second")
    await run(b"", fail=False)
    assert sorted(handled) == [(StreamId("o", "first"), b"first"), (StreamId("o", "second"), b"second")]


async def test_a_checkpoint_past_the_end_of_the_log_skips_nothing_new_and_leaves_a_gap(tmp_path: Path) -> None:
    log = tmp_path / "providers" / "default" / "log"
    async with Provider.open(tmp_path, queues=1):
        pass
    shutil.copytree(log, tmp_path / "earlier")
    async with Provider.open(tmp_path) as provider:
        subscription = await provider.subscribe("all", "orders/*", ignore)
        await provider.stream("orders", "42").publish(b"lost")
        await subscription.caught_up()
    shutil.rmtree(log)  # a crash of the machine, with relaxed durability
    (tmp_path / "earlier").rename(log)
    got: list[bytes] = []

    async def handler(event: Event) -> None:
        got.append(event.payload)

    async with Provider.open(tmp_path) as provider:
        await provider.stream("orders", "42").publish(b"new")
        subscription = await provider.subscribe("all", "orders/*", handler)
        await subscription.caught_up()
        (gap,) = await provider.store.gaps("default", "all")
    assert got == [b"new"]
    assert (gap.low, gap.high) == ((0, 0), (1, 0))


async def running(condition: Callable[[], bool], turn: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await turn(0.001)


async def test_a_thousand_stuck_handlers_of_one_queue_keep_no_other_stream_from_its_handler(tmp_path: Path) -> None:
    async with Provider.open(tmp_path, queues=1) as provider:
        stuck, free = set[str](), asyncio.Event()
        last = asyncio.Event()

        async def handler(event: Event) -> None:
            assert event.stream is not None
            if event.stream.key == "last":
                last.set()
            else:
                stuck.add(event.stream.key)
                await free.wait()

        await provider.publish_many([(StreamId("orders", str(number)), b"") for number in range(1000)])
        subscription = await provider.subscribe("all", "orders/*", handler, start="earliest")
        await provider.stream("orders", "last").publish(b"")
        await last.wait()
        assert len(stuck) == 1000
        free.set()
        await subscription.caught_up()
