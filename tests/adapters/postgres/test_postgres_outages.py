"""The server is killed, its processes are ended, or the answer to a commit is lost, while events flow."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from benchmarks.servers import PostgresServer
from headrace.adapters import AdapterContext
from headrace.adapters.log.acknowledgements import PendingAcknowledgements
from headrace.adapters.postgres import PostgresAdapter, PostgresLimits
from headrace.adapters.postgres.committer import PostgresCommitter
from headrace.adapters.postgres.connecting import DatabasePlace
from headrace.adapters.postgres.group import WaitingCall
from headrace.adapters.postgres.options import PostgresOptions
from headrace.adapters.postgres.schema import ProviderRow, register
from headrace.adapters.receiving import QueueReceiver
from headrace.streams.errors import StorageError, StorageFull
from headrace.streams.identity import SequenceToken
from headrace.streams.publishing import ProducerSequence, Receipt
from tests.adapters.postgres.opening import ANY, QUICK, ask, batch, opened, received, tables, texts
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


@pytest.mark.long
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
                assert cutter.cuts or number % 4 != 1
                cutter.cuts = 0
                await done
            found = await received(await adapter.open_receiver(0), 22)
    assert [text for text in found if text != "other"] == [str(number) for number in range(20)]


@pytest.mark.long
async def test_each_call_fails_at_its_own_deadline_and_later_ones_of_its_group_are_stored(
    own_server: PostgresServer,
) -> None:
    committer = await committer_at(own_server.url, AWAY)
    await asyncio.to_thread(own_server.kill)
    soon, late = (submitted(committer, text, timeout_s=timeout_s) for text, timeout_s in (("soon", 0.3), ("late", 60)))
    with pytest.raises(StorageError, match="connection"):
        await asyncio.wait_for(soon, 20)
    assert not late.done()
    await asyncio.to_thread(own_server.start)
    (receipt,) = await asyncio.wait_for(late, 60)
    assert receipt.token == SequenceToken(0)  # the other one was not stored
    assert committer.backend_pid()
    await committer.aclose()
    assert not committer.backend_pid()  # the server may give the number to another process


@pytest.mark.parametrize(("state", "is_full"), [("53100", True), ("25006", False), ("55P03", False)])
async def test_a_large_call_fails_with_the_reason_of_the_server(postgres_url: str, state: str, is_full: bool) -> None:
    committer = await committer_at(postgres_url, QUICK)
    await submitted(committer, "connect", timeout_s=20)
    before = committer.backend_pid()
    ask(
        postgres_url,
        f"""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN RAISE 'not today' USING ERRCODE = '{state}'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON {tables(postgres_url)[0]} FOR EACH ROW EXECUTE FUNCTION refuse()
        """,
    )
    large = "x" * (QUICK.literal_bytes + 1)
    with pytest.raises(StorageError, match="not today") as caught:
        await submitted(committer, large, timeout_s=0.5)
    assert isinstance(caught.value, StorageFull) is is_full
    ask(postgres_url, "DROP FUNCTION refuse CASCADE")
    await submitted(committer, large, timeout_s=20)
    assert committer.backend_pid() == before, "the connection was replaced"
    await committer.aclose()


async def test_a_connection_is_not_waited_for_when_no_time_is_left() -> None:
    """libpq waits for two seconds at least."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # says nothing
        url = f"postgresql://127.0.0.1:{server.getsockname()[1]}/db"
        place = DatabasePlace(PostgresOptions(url=url), QUICK._replace(request_s=30.0))
        with pytest.raises(psycopg.Error):
            await asyncio.wait_for(asyncio.to_thread(place.connect, 0.0), 15)


class BrokenAcknowledgements(PendingAcknowledgements):
    def pending(self) -> Mapping[int, int]:
        raise RuntimeError("broken")


async def test_an_unexpected_error_of_acknowledgements_ends_neither_publishing_nor_closing(postgres_url: str) -> None:
    broken = BrokenAcknowledgements()
    committer = await committer_at(postgres_url, QUICK, broken)
    await asyncio.sleep(4 * QUICK.acknowledge_s)
    assert await asyncio.wait_for(submitted(committer, "stored", timeout_s=20), 20)
    await asyncio.wait_for(committer.aclose(), 20)


async def test_acknowledgements_do_not_hold_up_publishes_while_the_server_is_away() -> None:
    """They are tried again when the server has answered on another connection."""
    attempts = 0

    def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.transport.abort()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"postgresql://127.0.0.1:{server.sockets[0].getsockname()[1]}/db?sslmode=disable&gssencmode=disable"
        acknowledgements = PendingAcknowledgements()
        place, provider = DatabasePlace(PostgresOptions(url=url), QUICK), ProviderRow(1, "x", 1)
        committer = PostgresCommitter(place, provider, acknowledgements, lambda _: None, group_bytes=1)
        acknowledgements.note(0, 1)
        for attempt in (1, 2):
            async with asyncio.timeout(20):
                while attempts < attempt:  # noqa: ASYNC110 (the thread tells nobody)
                    await asyncio.sleep(0.01)
            await asyncio.sleep(5 * QUICK.acknowledge_s)
            assert attempts == attempt
            committer.note_server_answered()
        await asyncio.wait_for(committer.aclose(), 20)


async def committer_at(
    url: str, limits: PostgresLimits, acknowledgements: PendingAcknowledgements | None = None
) -> PostgresCommitter:
    """Return a committer of a new provider with one queue."""
    place = DatabasePlace(PostgresOptions(url=url), limits)
    with psycopg.connect(url, autocommit=True) as connection:
        provider = register(connection, AdapterContext(provider="committer", queues=1), create=True)
    return PostgresCommitter(
        place, provider, acknowledgements or PendingAcknowledgements(), lambda _: None, group_bytes=1 << 20
    )


def submitted(committer: PostgresCommitter, text: str, *, timeout_s: float) -> asyncio.Future[Sequence[Receipt]]:
    answer: asyncio.Future[Sequence[Receipt]] = asyncio.get_running_loop().create_future()
    committer.submit(WaitingCall([(0, batch(text))], 1, answer, None, time.monotonic() + timeout_s))
    return answer


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
async def test_readers_do_not_stay_on_a_standby(own_server: PostgresServer) -> None:
    """As behind a load balancer while the primary starts again."""
    standby = own_server.directory / "data" / "standby.signal"
    async with opened(own_server.url, provider="standby", poll_s=0.05) as adapter:
        await adapter.enqueue([(0, batch("stored"))])
        receiver = await adapter.open_receiver(0)
        await asyncio.to_thread(own_server.stop)
        standby.touch()
        await asyncio.to_thread(own_server.start)
        with pytest.raises(StorageError, match="is a standby"):
            await after_outage(lambda: adapter.bounds(0))
        with pytest.raises(StorageError, match="is a standby"):
            await after_outage(lambda: receiver.receive(ANY, ANY))
        await asyncio.to_thread(own_server.stop)
        standby.unlink()
        await asyncio.to_thread(own_server.start)
        assert await asyncio.wait_for(drain(receiver, 1), 60) == ["stored"]


async def after_outage(work: Callable[[], Awaitable[object]]) -> None:
    """Try until there is an answer, or an error other than that of a lost or refused connection."""
    async with asyncio.timeout(60):
        while True:
            try:
                await work()
            except StorageError as error:
                if "connection" not in str(error):
                    raise
                await asyncio.sleep(0.02)
            else:
                return


@pytest.mark.long
async def test_the_primary_is_found_among_several_hosts(own_server: PostgresServer) -> None:
    with PostgresServer() as standby:
        await asyncio.to_thread(standby.stop)
        (standby.directory / "data" / "standby.signal").touch()
        await asyncio.to_thread(standby.start)
        url = own_server.url.replace(own_server.address, f"{standby.address},{own_server.address}")
        async with opened(url, provider="several") as adapter:
            await adapter.enqueue([(0, batch("x"))])
            assert await received(await adapter.open_receiver(0), 1) == ["x"]


def use_standby(url: str, name: str) -> None:
    """Let commits wait for a synchronous standby, or for none if `name` is empty. Return when they do."""
    ask(url, f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
    ask(url, "SELECT pg_reload_conf()")
    while name and not commits_wait(url):
        time.sleep(0.01)


def commits_wait(url: str) -> bool:
    connection = psycopg.connect(url, autocommit=True)
    try:
        connection.pgconn.send_query(b"SELECT pg_logical_emit_message(true, 'probe', '')")
        pid, event = connection.info.backend_pid, None
        while event not in ("SyncRep", "ClientRead"):
            ((event,),) = ask(url, "SELECT wait_event FROM pg_stat_activity WHERE pid = %s", pid)
        ask(url, "SELECT pg_terminate_backend(%s)", pid)
        return event == "SyncRep"
    finally:
        connection.close()


async def waiting_for_standby(url: str, call: asyncio.Future[Any], besides: Sequence[int] = ()) -> int:
    """Return the process that waits for the standby, as soon as there is one. The call has no answer meanwhile."""
    found: list[int] = []
    while not found:
        await asyncio.sleep(0.01)
        assert not call.done(), "confirmed without the standby"
        pids = ask(
            url, "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name = 'headrace'"
        )
        found = [pid for (pid,) in pids if pid not in besides]
    return found[0]


@pytest.mark.parametrize("ends", ["pg_terminate_backend", "pg_cancel_backend"])
async def test_a_publish_waits_for_the_standby_though_its_process_does_not_any_more(
    own_server: PostgresServer, ends: str
) -> None:
    """The block is visible then, and would be lost with this server."""
    async with opened(own_server.url, publish_timeout_s=60) as adapter:
        await adapter.enqueue([(0, batch("first"))])
        use_standby(own_server.url, "nobody")
        call = asyncio.ensure_future(adapter.enqueue([(0, batch("second"))]))
        waiting = await waiting_for_standby(own_server.url, call)
        ask(own_server.url, f"SELECT {ends}({waiting})")
        await waiting_for_standby(own_server.url, call, [waiting])
        use_standby(own_server.url, "")
        await call
        assert await received(await adapter.open_receiver(0), 2) == ["first", "second"]


@pytest.mark.long
async def test_a_repeated_call_waits_for_the_standby_like_the_first(own_server: PostgresServer) -> None:
    sequence = ProducerSequence("p", 1, 0)
    async with opened(own_server.url, publish_timeout_s=0.5, limits=AWAY) as adapter:
        use_standby(own_server.url, "nobody")
        with pytest.raises(StorageError, match="may or may not be stored"):
            await adapter.enqueue([(0, batch("one"))], sequence=sequence)
    ask(own_server.url, END_PROCESSES)
    async with opened(own_server.url, publish_timeout_s=60) as adapter:
        call = asyncio.ensure_future(adapter.enqueue([(0, batch("one"))], sequence=sequence))
        await waiting_for_standby(own_server.url, call)
        use_standby(own_server.url, "")
        assert (await call)[0].duplicate
        assert (await adapter.bounds(0)).next == 1
