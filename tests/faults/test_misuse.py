"""Handlers and callers that misuse the API: nothing hangs, and no stream stops without a message."""

import asyncio
import resource
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import Event, Provider, SequenceToken, Start, StreamId
from headrace.streams.errors import Busy, InvalidArgument, NotFound, StorageFull
from headrace.streams.subscriptions import RetryPolicy

PATIENCE_S = 20
AT_ONCE = RetryPolicy(max_attempts=1)
STREAM = StreamId("orders", "42")


class NoException(BaseException):
    pass


class WithoutText(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("error", [NoException, GeneratorExit, WithoutText])
async def test_every_exception_of_a_handler_is_its_failure(tmp_path: Path, error: type[BaseException]) -> None:
    passed = asyncio.Event()

    async def handle(event: Event) -> None:
        if event.payload == b"bad":
            raise error
        passed.set()

    async with Provider.open(tmp_path / "data", queues=1) as provider, asyncio.timeout(PATIENCE_S):
        await provider.subscribe("printer", STREAM, handle, retry=AT_ONCE)
        await provider.publish(STREAM, [b"bad", b"good"])
        await passed.wait()
        (letter,) = await provider.store.dead_letters(provider.name, "printer")
    assert letter.reason.startswith(error.__name__)


async def test_a_handler_that_ignores_its_cancellation_is_left_behind(tmp_path: Path) -> None:
    started, released = asyncio.Event(), asyncio.Event()

    async def handle(_: Event) -> None:
        started.set()
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    async with Provider.open(tmp_path / "data", queues=1) as provider, asyncio.timeout(PATIENCE_S):
        await provider.subscribe("printer", STREAM, handle)
        await provider.publish(STREAM, b"1")
        await started.wait()
        await provider.withdraw("printer", drain_s=0)
        released.set()


async def close(provider: Provider) -> None:
    await provider.withdraw("printer")


async def seek(provider: Provider) -> None:
    await provider.seek("printer", Start.earliest())


async def remove(provider: Provider) -> None:
    await provider.delete_subscription("printer")


@pytest.mark.parametrize("end", [close, seek, remove, Provider.aclose])
async def test_a_handler_cannot_wait_for_its_own_end(
    tmp_path: Path, end: Callable[[Provider], Awaitable[None]]
) -> None:
    refused: list[BaseException] = []
    done = asyncio.Event()

    async def handle(_: Event) -> None:
        try:
            await end(provider)
        except InvalidArgument as error:
            refused.append(error)
        done.set()

    async with Provider.open(tmp_path / "data", queues=1) as provider, asyncio.timeout(PATIENCE_S):
        await provider.subscribe("printer", STREAM, handle)
        await provider.publish(STREAM, b"1")
        await done.wait()
        assert refused
        assert list(provider.manager.served) == ["printer"]


async def test_on_completed_that_does_not_end_holds_up_no_closing(tmp_path: Path) -> None:
    class Observer:
        async def on_next(self, event: Event) -> None: ...

        async def on_completed(self) -> None:
            await asyncio.Event().wait()

    async with Provider.open(tmp_path / "data", queues=1) as provider, asyncio.timeout(PATIENCE_S):
        await provider.subscribe("printer", STREAM, Observer())
        await provider.withdraw("printer", drain_s=0)


async def ignore(_: Event) -> None: ...


async def wrong(_: Event) -> bool:
    return False


@pytest.mark.parametrize(
    "option", [{"on_failure": "pause"}, {"retry": {}}, {"slow_consumer": "detach"}, {"filter": wrong}, {"start": ""}]
)
async def test_an_option_of_a_wrong_type_is_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    async with Provider.open(tmp_path / "data", queues=1) as provider:
        with pytest.raises(InvalidArgument):
            await provider.subscribe("printer", STREAM, ignore, **option)


async def test_a_token_past_the_end_is_refused_by_its_index_too(tmp_path: Path) -> None:
    async with Provider.open(tmp_path / "data", queues=1) as provider:
        with pytest.raises(InvalidArgument, match="past the end"):
            await provider.subscribe("printer", STREAM, ignore, start=Start.at(SequenceToken(0, 1)))


async def test_failed_open_does_not_decide_the_number_of_queues(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        async with Provider.open(tmp_path / "data", adapter="nosuch"):
            pass
    with pytest.raises(InvalidArgument):
        async with Provider.open(tmp_path / "data", queues=3, options={"nosuch": 1}):
            pass
    async with Provider.open(tmp_path / "data", queues=2) as provider:
        assert provider.queues == 2


async def test_no_name_leads_out_of_the_directory_of_locks(tmp_path: Path) -> None:
    async with Provider.open(tmp_path / "data", queues=1) as provider:
        with pytest.raises(NotFound):
            await provider.delete_subscription("../../../escaped")
    assert not await asyncio.to_thread((tmp_path / "escaped.lock").exists)


async def test_two_at_once_do_not_both_serve_a_subscription() -> None:
    async with Provider.open(adapter="memory", queues=1) as provider:
        both = (provider.subscribe("printer", STREAM, ignore) for _ in range(2))
        outcomes = await asyncio.gather(*both, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes].count(Busy) == 1


async def test_waiting_for_a_closed_subscription_raises_not_found(tmp_path: Path) -> None:
    async with Provider.open(tmp_path / "data", queues=1) as provider:
        subscription = await provider.subscribe("printer", STREAM, ignore)
        await subscription.close()
        with pytest.raises(NotFound):
            await subscription.caught_up()
        assert not await subscription.resume(STREAM)  # it is stored: nothing is paused


async def test_a_seek_that_cannot_be_stored_stops_no_delivery(tmp_path: Path) -> None:
    delivered = asyncio.Event()

    async def handle(_: Event) -> None:
        delivered.set()

    async with Provider.open(tmp_path / "data", queues=1) as provider, asyncio.timeout(PATIENCE_S):
        await provider.subscribe("printer", STREAM, handle)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))  # to the processes of this machine a full disk
        try:
            with pytest.raises(StorageFull):
                await provider.seek("printer", Start.earliest())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        await provider.publish(STREAM, b"1")
        await delivered.wait()
