"""The server is killed, its processes are ended, or the answer to a commit is lost, while events flow."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from benchmarks.servers import PostgresServer
from headrace.adapters.postgres import PostgresAdapter
from headrace.adapters.receiving import QueueReceiver
from headrace.streams.errors import StorageError
from headrace.streams.publishing import ProducerSequence
from tests.adapters.postgres.opening import ANY, QUICK, ask, batch, opened, received, texts
from tests.effects.test_lost_answers import CommitCutter
from tests.faults.cluster_stores import lasting_port

AWAY = QUICK._replace(request_s=1.0)
END_PROCESSES = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'headrace'"


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that the test may kill and start. It ends with the thread that started it."""
    server = PostgresServer()
    server.port = lasting_port()
    with server:
        yield server


async def drain(receiver: QueueReceiver, count: int) -> list[str]:
    """Receive so many events, and continue after errors of the server."""
    found: list[str] = []
    while len(found) < count:
        try:
            result = await receiver.receive(ANY, ANY)
        except StorageError:
            await asyncio.sleep(0.02)
            continue
        assert result.gap is None
        found += texts(result.batches)
    return found


async def test_killed_server_loses_nothing_doubles_nothing_and_readers_resume(own_server: PostgresServer) -> None:
    async with opened(own_server.url, provider="killed", publish_timeout_s=60) as adapter:
        receiver = await adapter.open_receiver(0)
        reading = asyncio.create_task(drain(receiver, 400))

        async def produce(adapter: PostgresAdapter) -> None:
            for number in range(400):
                await adapter.enqueue([(0, batch(str(number)))])

        producing = asyncio.create_task(produce(adapter))
        for reached in (100, 250):
            async with asyncio.timeout(60):
                while (await bounds_or_none(adapter)) < reached:  # noqa: ASYNC110 (the server tells nobody)
                    await asyncio.sleep(0.005)
            await asyncio.to_thread(own_server.kill)
            await asyncio.to_thread(own_server.start)
        await producing
        assert await asyncio.wait_for(reading, 60) == [str(number) for number in range(400)]
        assert await drain(await adapter.open_receiver(0, 0), 400) == [str(number) for number in range(400)]


def signal_all(server: int, processes: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to the server and those of its processes that still run."""
    for pid in (server, *processes):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def bounds_or_none(adapter: PostgresAdapter) -> int:
    try:
        return (await adapter.bounds(0)).next
    except StorageError:
        return 0


async def test_ended_processes_of_the_server_are_replaced(postgres_url: str) -> None:
    async with opened(postgres_url, queues=2) as adapter:
        receiver = await adapter.open_receiver(0)
        reading = asyncio.create_task(drain(receiver, 200))
        for number in range(200):
            await adapter.enqueue([(0, batch(str(number)))])
            if number % 50 == 25:
                ask(postgres_url, END_PROCESSES)
        assert await asyncio.wait_for(reading, 60) == [str(number) for number in range(200)]


async def test_a_commit_whose_answer_is_lost_is_stored_once(postgres_url: str) -> None:
    parts = urlsplit(postgres_url)
    cutter = CommitCutter(parts.hostname or "", parts.port or 0, b"; COMMIT")
    cutter.cutting = False
    async with cutter.serving() as port:
        url = postgres_url.replace(f":{parts.port}/", f":{port}/")
        async with opened(url) as adapter, opened(postgres_url) as other:
            for number in range(20):
                cutter.cutting = number % 4 == 1
                calls = [adapter.enqueue([(0, batch(str(number)))])]
                if number % 8 == 5:  # another process takes the next offset first
                    calls.append(other.enqueue([(0, batch("other", "o"))]))
                done = asyncio.gather(*calls)
                while cutter.cutting and not done.done():
                    cutter.cutting = not cutter.cuts
                    await asyncio.sleep(0.01)
                cutter.cuts = 0
                await done
            found = await received(await adapter.open_receiver(0), 22)
    assert [text for text in found if text != "other"] == [str(number) for number in range(20)]


async def test_lost_answer_of_an_idempotent_call_is_no_conflict(postgres_url: str) -> None:
    parts = urlsplit(postgres_url)
    cutter = CommitCutter(parts.hostname or "", parts.port or 0, b"; COMMIT")
    cutter.cutting = False
    async with cutter.serving() as port:
        async with opened(postgres_url.replace(f":{parts.port}/", f":{port}/")) as adapter:
            for number in range(1, 4):
                cutter.cutting = number == 2
                call = asyncio.ensure_future(
                    adapter.enqueue([(0, batch(str(number)))], sequence=ProducerSequence("p", number, number - 1))
                )
                while cutter.cutting and not call.done():
                    cutter.cutting = not cutter.cuts
                    await asyncio.sleep(0.01)
                await call
            assert cutter.cuts
            assert await received(await adapter.open_receiver(0), 3) == ["1", "2", "3"]


async def test_publishes_and_readers_fail_while_the_server_stands_still_and_continue_after(
    own_server: PostgresServer,
) -> None:
    async with opened(own_server.url, provider="frozen", limits=AWAY, publish_timeout_s=0.5, poll_s=0.1) as adapter:
        await adapter.enqueue([(0, batch("before"))])
        receiver = await adapter.open_receiver(0)
        assert await received(receiver, 1) == ["before"]
        waiting = asyncio.ensure_future(receiver.receive(ANY, ANY))
        processes = [pid for (pid,) in ask(own_server.url, "SELECT pid FROM pg_stat_activity WHERE pid IS NOT NULL")]
        signal_all(own_server.pid, processes, signal.SIGSTOP)
        try:
            with pytest.raises(StorageError, match="no answer within"):
                await adapter.enqueue([(0, batch("away"))])
            with pytest.raises(StorageError):
                await asyncio.wait_for(waiting, 60)
        finally:
            signal_all(own_server.pid, processes, signal.SIGCONT)
        async with asyncio.timeout(60):
            while True:
                try:
                    await adapter.enqueue([(0, batch("after"))])
                    break
                except StorageError:
                    await asyncio.sleep(0.05)
            found = await drain(receiver, 1)
            while "after" not in found:
                found += await drain(receiver, 1)
        assert set(found) <= {"away", "after"}
