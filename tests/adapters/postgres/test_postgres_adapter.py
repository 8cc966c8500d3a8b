"""Queues in PostgreSQL beyond the conformance suite: order under open transactions, retention, damage, settings."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import make_url

from benchmarks.servers import PostgresServer
from headrace.adapters.postgres.options import check_url, with_location, without_password
from headrace.adapters.receiving import Gap, QueueReceiver, Received
from headrace.adapters.seam import QueueAdapter
from headrace.streams.errors import CorruptRecord, DataDirectoryError, InvalidArgument, QueueFull, StorageError
from headrace.streams.events import EventBatch
from headrace.streams.identity import StreamId
from headrace.streams.publishing import ProducerSequence
from tests.adapters.postgres.opening import ANY, QUICK, ask, batch, opened, received, replace_end, tables, texts

END_CONNECTIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'headrace'"
STORED = "SELECT queue, acknowledged FROM headrace_queue ORDER BY queue"
COUNT_UPDATES = """
    CREATE TABLE updates (synchronous text, xid text);
    CREATE FUNCTION count_update() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO updates VALUES (current_setting('synchronous_commit'), pg_current_xact_id()::text);
        RETURN NEW;
    END $$;
    CREATE TRIGGER count_update BEFORE UPDATE ON headrace_queue FOR EACH ROW EXECUTE FUNCTION count_update()
"""
SMALL_SEGMENTS: dict[str, Any] = {"segment_bytes": 1 << 16}


def large(number: int) -> EventBatch:
    """A batch of about 20 KB, whose payload begins with the number."""
    return batch(f"{number:4d}" * 5000)


def numbers(found: list[str]) -> list[int]:
    return [int(text[:4]) for text in found]


# ---- order and transactions --------------------------------------------------------------------------------------


async def test_a_reader_never_passes_an_open_transaction_and_other_queues_go_on(postgres_url: str) -> None:
    async with opened(postgres_url, queues=2) as one, opened(postgres_url, queues=2) as two:
        await one.enqueue([(0, batch("before"))])
        reader = await one.open_receiver(0)
        assert await received(reader, 1) == ["before"]
        connection = await psycopg.AsyncConnection.connect(postgres_url)
        try:  # another writer that has its place in queue 0, and does not commit
            await connection.execute("UPDATE headrace_queue SET next = next + 1 WHERE queue = 0")
            waiting = asyncio.ensure_future(two.enqueue([(0, batch("after"))]))
            await one.enqueue([(1, batch("other"))])
            assert await received(await two.open_receiver(1), 1) == ["other"]
            assert (await one.bounds(0)).next == 1
            assert not waiting.done()
            await connection.rollback()
        finally:
            await connection.close()
        (receipt,) = await waiting
        assert receipt.token is not None
        assert receipt.token.offset == 1
        assert await received(reader, 1) == ["after"]


async def test_calls_over_many_queues_from_several_processes_do_not_deadlock(postgres_url: str) -> None:
    async with opened(postgres_url, queues=8) as one, opened(postgres_url, queues=8) as two:

        async def produce(adapter: QueueAdapter, name: str, order: range) -> None:
            for number in range(40):
                await adapter.enqueue([(queue, batch(f"{name} {number}", name)) for queue in order])

        async with asyncio.TaskGroup() as producers:
            for adapter, name, order in (
                (one, "a", range(8)), (two, "b", range(7, -1, -1)), (one, "c", range(7, -1, -1)), (two, "d", range(8)),
            ):  # fmt: skip
                producers.create_task(produce(adapter, name, order))
        for queue in range(8):
            found = await received(await one.open_receiver(queue), 160)
            for name in "abcd":
                mine = [text for text in found if text.startswith(name)]
                assert mine == [f"{name} {number}" for number in range(40)]


async def test_acknowledgements_of_all_queues_are_one_transaction_that_waits_for_nobody(postgres_url: str) -> None:
    limits = QUICK._replace(acknowledge_s=1000)
    async with opened(postgres_url, queues=4, limits=limits) as adapter:
        await adapter.enqueue([(queue, batch("x")) for queue in range(4)])
    ask(postgres_url, COUNT_UPDATES)
    async with opened(postgres_url, queues=4, limits=QUICK) as adapter:
        receivers = [await adapter.open_receiver(queue) for queue in range(4)]
        with psycopg.connect(postgres_url) as writer:  # another process that stores into queue 1
            writer.execute("SELECT * FROM headrace_queue WHERE queue = 1 FOR UPDATE")
            for receiver in receivers:
                await receiver.acknowledge(1)
            while ask(postgres_url, STORED) != [(0, 1), (1, 0), (2, 1), (3, 1)]:  # noqa: ASYNC110 (the server tells nobody)
                await asyncio.sleep(0.01)
        while ask(postgres_url, STORED) != [(queue, 1) for queue in range(4)]:  # noqa: ASYNC110 (the server tells nobody)
            await asyncio.sleep(0.01)
    updates = ask(postgres_url, "SELECT synchronous, count(*), count(DISTINCT xid) FROM updates GROUP BY 1")
    assert updates == [("off", 4, 2)]


async def test_waiting_publishes_share_transactions(postgres_url: str) -> None:
    async with opened(postgres_url) as adapter:
        (before,) = ask(postgres_url, "SELECT pg_current_xact_id()::text::bigint")
        await asyncio.gather(*(adapter.enqueue([(0, batch(str(number)))]) for number in range(1000)))
        (after,) = ask(postgres_url, "SELECT pg_current_xact_id()::text::bigint")
        assert after[0] - before[0] < 50
        assert await received(await adapter.open_receiver(0), 1000) == [str(number) for number in range(1000)]


async def test_too_much_that_waits_is_refused(postgres_url: str) -> None:
    async with opened(postgres_url, limits=QUICK._replace(pending_bytes=50_000)) as adapter:
        calls = [adapter.enqueue([(0, large(number))]) for number in range(2)]
        with pytest.raises(QueueFull, match="wait for PostgreSQL"):
            await adapter.enqueue([(0, large(2))])
        await asyncio.gather(*calls)


def slow_down(url: str, table: str, seconds: float) -> None:
    """Make each chunk take so long."""
    ask(
        url,
        f"""
        CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN PERFORM pg_sleep({seconds}); RETURN NEW; END $$;
        CREATE TRIGGER slow BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION slow()
        """,
    )


async def test_a_large_call_may_take_longer_than_one_statement(postgres_url: str) -> None:
    limits = QUICK._replace(copy_bytes=160_000)
    async with opened(postgres_url, limits=limits, publish_timeout_s=60) as adapter:
        slow_down(postgres_url, tables(postgres_url)[0], 1.5 * limits.request_s / 76)
        await asyncio.wait_for(adapter.enqueue([(0, large(number)) for number in range(30)]), 60)
        assert numbers(await received(await adapter.open_receiver(0), 30)) == list(range(30))


async def test_a_call_that_is_too_large_for_its_time_is_an_error_that_says_so(postgres_url: str) -> None:
    limits = QUICK._replace(copy_bytes=8_000)
    async with opened(postgres_url, limits=limits, publish_timeout_s=0.5) as adapter:
        await adapter.enqueue([(0, batch("connect"))])
        slow_down(postgres_url, tables(postgres_url)[0], 0.1)
        with pytest.raises(StorageError, match=r"bytes of one commit could not be stored .* publish fewer events"):
            await adapter.enqueue([(0, large(number)) for number in range(30)])
        assert await adapter.bounds(0) == (0, 1)


async def test_events_that_the_server_refuses_to_commit_are_not_called_uncertain(postgres_url: str) -> None:
    async with opened(postgres_url) as adapter:
        ask(
            postgres_url,
            """
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not today'; END $$;
            CREATE TRIGGER refuse BEFORE UPDATE ON headrace_queue FOR EACH ROW EXECUTE FUNCTION refuse()
            """,
        )
        with pytest.raises(StorageError, match="not today") as caught:
            await adapter.enqueue([(0, batch("x"))])
        assert "may or may not" not in str(caught.value)
        assert await adapter.bounds(0) == (0, 0)


# ---- blocks ----------------------------------------------------------------------------------------------------


async def test_blocks_larger_than_one_query_are_read_whole(postgres_url: str) -> None:
    async with opened(postgres_url, limits=QUICK._replace(fetch_bytes=32_000)) as adapter:
        await adapter.enqueue([(0, large(number)) for number in range(30)])
        await adapter.enqueue([(0, batch("a" * 900_000))])
        await adapter.enqueue([(0, large(30))])
        found = await received(await adapter.open_receiver(0), 32)
        assert numbers(found[:30]) == list(range(30))
        assert len(found[30]) == 900_000
        assert numbers(found[31:]) == [30]
        assert numbers(await received(await adapter.open_receiver(0, 17), 13))[:13] == list(range(17, 30))


async def test_chunks_are_stored_plain_in_their_page(postgres_url: str) -> None:
    async with opened(postgres_url) as adapter:
        await adapter.enqueue([(0, large(number)) for number in range(3)])
        (table,) = tables(postgres_url)
        query = "SELECT attstorage::text FROM pg_attribute WHERE attrelid = %s::regclass AND attname = 'chunk'"
        assert ask(postgres_url, query, table) == [("p",)]
        ((rows, pages),) = ask(
            postgres_url, f"SELECT count(*), count(DISTINCT split_part(ctid::text, ',', 1)) FROM {table}"
        )
        assert rows - 1 <= pages <= rows


async def test_a_damaged_chunk_is_an_error_with_its_place_after_the_batches_before_it(postgres_url: str) -> None:
    async with opened(postgres_url) as adapter:
        for number in range(3):
            await adapter.enqueue([(0, batch(str(number)))])
        (table,) = tables(postgres_url)
        ask(postgres_url, f"UPDATE {table} SET chunk = set_byte(chunk, 60, 255 - get_byte(chunk, 60)) WHERE first = 1")
        receiver = await adapter.open_receiver(0)
        assert await received(receiver, 1) == ["0"]
        with pytest.raises(CorruptRecord, match="queue 0, offset 1") as caught:
            await receiver.receive(ANY, ANY)
        assert caught.value.next_offset == 2
        assert await received(await adapter.open_receiver(0, 2), 1) == ["2"]
        ask(postgres_url, f"DELETE FROM {table} WHERE first = 1")
        with pytest.raises(CorruptRecord, match="missing"):
            await (await adapter.open_receiver(0, 1)).receive(ANY, ANY)


@pytest.mark.parametrize("damage", ["DELETE FROM {} WHERE first >= 2", "DROP TABLE {}"])
async def test_a_damage_at_the_end_of_a_segment_ends_before_the_next_segment(postgres_url: str, damage: str) -> None:
    """An operator who skips the damage must not skip the batches after it."""
    async with opened(postgres_url, **SMALL_SEGMENTS) as adapter:
        for number in range(12):
            await adapter.enqueue([(0, large(number))])
            await adapter.apply_retention({0: 0})
        ((_, second),) = ask(postgres_url, "SELECT segment, first FROM headrace_segment WHERE segment = 1")
        ask(postgres_url, damage.format(tables(postgres_url)[0]))
        with pytest.raises(CorruptRecord, match=f"offsets 2 to {second - 1}: .*missing") as caught:
            await (await adapter.open_receiver(0, 2)).receive(ANY, ANY)
        assert caught.value.next_offset == second
        assert numbers(await received(await adapter.open_receiver(0, second), 12 - second)) == list(range(second, 12))


async def test_a_queue_that_has_lost_its_end_is_a_fault(postgres_url: str) -> None:
    """As after a restored backup."""
    async with opened(postgres_url, poll_s=0.05) as adapter:
        for number in range(3):
            await adapter.enqueue([(0, batch(str(number)))])
        receiver = await adapter.open_receiver(0)
        await received(receiver, 3)
        waiting = asyncio.ensure_future(receiver.receive(ANY, ANY))
        ask(postgres_url, "UPDATE headrace_queue SET next = 2")
        with pytest.raises(StorageError, match=re.escape("lost its end: offsets from 2 to 2")):
            await asyncio.wait_for(waiting, 20)
        assert await adapter.resume_at(0, 3) == 2


async def past_outage(receiver: QueueReceiver, receiving: asyncio.Future[Received] | None = None) -> Received:
    """Return the next result. Receive again after errors of the connection."""
    while True:
        try:
            return await (receiving or receiver.receive(ANY, ANY))
        except StorageError as error:
            if "connection" not in str(error):
                raise
        receiving = None
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("cut", [False, True])
async def test_a_lost_end_is_a_fault_also_after_the_queue_has_grown_past_the_reader(
    postgres_url: str, *, cut: bool
) -> None:
    async with opened(postgres_url, poll_s=1000) as adapter, opened(postgres_url, poll_s=1000) as other:
        for number in range(10):
            await other.enqueue([(0, batch(str(number)))])
        receiver = await adapter.open_receiver(0, 0)
        await received(receiver, 10)
        waiting = asyncio.ensure_future(receiver.receive(ANY, ANY))
        replace_end(postgres_url, 7)
        for number in range(7, 12):
            await other.enqueue([(0, batch(f"new {number}"))])
        if cut:
            ask(postgres_url, END_CONNECTIONS)
        with pytest.raises(StorageError, match="offsets from 7 to 9 have other batches than those that were read"):
            await asyncio.wait_for(past_outage(receiver, waiting), 20)
        await adapter.enqueue([(0, batch("more"))])
        with pytest.raises(StorageError, match="offsets from 7 to 9"):  # it stays one
            await asyncio.wait_for(past_outage(receiver), 20)
        assert (await received(await adapter.open_receiver(0, 7), 5))[:5] == [f"new {n}" for n in range(7, 12)]


async def test_a_lost_end_is_a_fault_also_if_the_reader_waits_for_commits_of_its_own_process(postgres_url: str) -> None:
    async with opened(postgres_url, poll_s=1000) as adapter:
        await adapter.enqueue([(0, batch(str(number))) for number in range(3)])
        offered: list[str] = []
        receiver = await adapter.open_receiver(0, 3)
        receiver.offer_to(lambda batches: not offered.extend(texts(batches)))
        waiting = asyncio.ensure_future(receiver.receive(ANY, ANY))
        await asyncio.sleep(0)
        await adapter.enqueue([(0, batch("3"))])
        assert offered == ["3"]
        replace_end(postgres_url, 3)
        for number in range(3, 6):
            await adapter.enqueue([(0, batch(f"new {number}"))])
        assert (await asyncio.wait_for(waiting, 20)).next_offset == 4  # because of the offer
        with pytest.raises(StorageError, match="offsets from 3 to 3 have other batches"):
            await asyncio.wait_for(receiver.receive(ANY, ANY), 20)
        assert offered == ["3"]


async def test_the_block_before_a_reader_may_be_in_another_segment_or_deleted(postgres_url: str) -> None:
    async with opened(postgres_url, **SMALL_SEGMENTS) as adapter, opened(postgres_url, **SMALL_SEGMENTS) as other:
        readers = [await adapter.open_receiver(0) for _ in range(2)]
        for number in range(12):
            await other.enqueue([(0, large(number))])
            assert numbers(await received(readers[0], 1)) == [number]
            await other.apply_retention({0: 0})
            if number % 4 == 3:
                assert numbers(await received(readers[1], 4)) == list(range(number - 3, number + 1))
        assert len(tables(postgres_url)) >= 3
    retain: dict[str, Any] = {**SMALL_SEGMENTS, "retain_bytes": 1}
    async with opened(postgres_url, **retain) as adapter:
        reader = await adapter.open_receiver(0, 12)
        for _ in range(3):
            await adapter.apply_retention({0: 12})
        await adapter.enqueue([(0, large(number)) for number in range(12, 16)])
        await adapter.apply_retention({0: 12})
        await adapter.apply_retention({0: 12})
        assert (await adapter.bounds(0)).first == 12
        assert numbers(await received(reader, 4)) == list(range(12, 16))


# ---- retention -------------------------------------------------------------------------------------------------


async def test_retention_drops_segments_and_a_reader_behind_gets_one_gap(postgres_url: str) -> None:
    async with opened(postgres_url, retain_bytes=1, retain_unfinished=False, **SMALL_SEGMENTS) as adapter:
        behind = await adapter.open_receiver(0, 0)
        for number in range(20):
            await adapter.enqueue([(0, large(number))])
            await adapter.apply_retention({})
        first, end = await adapter.bounds(0)
        assert 0 < first < end == 20
        assert len(tables(postgres_url)) <= 2
        gap = await behind.receive(ANY, ANY)
        while gap.batches:  # read ahead before they were dropped
            gap = await behind.receive(ANY, ANY)
        assert gap.gap is not None
        assert gap.gap == Gap(gap.gap.low, first, "removed by retention")
        assert numbers(await received(behind, 20 - first)) == list(range(first, 20))
        statistics = await adapter.statistics(0)
        assert statistics.events == 20 - first
        assert statistics.bytes is not None
        assert 20_000 * (20 - first) < statistics.bytes < 20_000 * (21 - first)


async def test_retention_of_queues_that_are_gone_is_an_error_that_says_so(postgres_url: str) -> None:
    async with opened(postgres_url) as adapter:
        ask(postgres_url, "DELETE FROM headrace_segment")
        with pytest.raises(StorageError, match="does not have the queues of this provider any more"):
            await adapter.apply_retention({})


async def test_a_start_by_time_skips_no_retained_batch_while_a_segment_is_dropped(postgres_url: str) -> None:
    async with opened(postgres_url, **SMALL_SEGMENTS) as adapter:
        for number in range(20):
            await adapter.enqueue([(0, large(number))])
            await adapter.apply_retention({0: 0})
        await adapter.enqueue([(0, large(20))])
        *old, last = tables(postgres_url)
        assert len(old) >= 4
        with psycopg.connect(postgres_url) as retention:  # as `apply_retention` of another process, which waits
            for table in old:
                retention.execute("DELETE FROM headrace_segment WHERE segment = %s", [int(table.rpartition("_")[2])])
                retention.execute(f"DROP TABLE {table}".encode())
            searching = asyncio.ensure_future(adapter.offset_at(0, 0))
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'relation'"
            while ask(postgres_url, waits) == [(0,)]:  # noqa: ASYNC110 (the server tells nobody)
                await asyncio.sleep(0.005)
        first = await searching
        assert tables(postgres_url) == [last]
        assert 0 < first < 21
        assert first == (await adapter.bounds(0)).first


async def test_a_start_by_time_skips_no_batch_if_a_block_is_missing(postgres_url: str) -> None:
    async with opened(postgres_url, **SMALL_SEGMENTS) as adapter:
        for number in range(20):
            await adapter.enqueue([(0, large(number))])
            await adapter.apply_retention({0: 0})
        times = [(await adapter.backlog(0, offset)).since_us for offset in range(20)]
        for missing in (10, 11, 19):
            for table in tables(postgres_url):
                ask(postgres_url, f"DELETE FROM {table} WHERE queue = 0 AND first = {missing}")
        found = [await adapter.offset_at(0, time_us or 0) for time_us in times]
        # The time of a missing batch is not known: a start there, or just behind it, begins with it.
        assert found == [*range(11), 10, 10, *range(13, 20)]
        assert await adapter.offset_at(0, 0) == 0


async def test_unfinished_batches_stay_and_are_read_over_all_segments(postgres_url: str) -> None:
    async with opened(postgres_url, queues=2, retain_bytes=1, **SMALL_SEGMENTS) as adapter:
        for number in range(20):
            await adapter.enqueue([(0, large(number))])
            if not number:
                await adapter.enqueue([(1, batch("idle"))])
            await adapter.apply_retention({0: 0, 1: 0})
        assert len(tables(postgres_url)) >= 5
        assert numbers(await received(await adapter.open_receiver(0), 20)) == list(range(20))
        found = [await adapter.backlog(0, offset) for offset in range(20)]
        assert [each.batches for each in found] == list(range(20, 0, -1))
        times = [each.since_us for each in found]
        assert [await adapter.offset_at(0, time_us) for time_us in times if time_us is not None] == list(range(20))
        await adapter.apply_retention({0: 20, 1: 0})
        assert (await adapter.bounds(1)).first == 0  # one queue keeps the segment of all
        await adapter.apply_retention({0: 20, 1: 1})
        await adapter.apply_retention({0: 20, 1: 1})
        assert (await adapter.bounds(0)).first > 10
        assert await adapter.bounds(1) == (1, 1)
        await adapter.enqueue([(1, batch("new"))])
        assert await received(await adapter.open_receiver(1), 1) == ["new"]


@pytest.mark.long
async def test_a_reader_follows_into_a_segment_that_another_process_began(postgres_url: str) -> None:
    async with opened(postgres_url, **SMALL_SEGMENTS) as one, opened(postgres_url, **SMALL_SEGMENTS) as two:
        reader = await two.open_receiver(0)
        for number in range(12):
            await one.enqueue([(0, large(number))])
            assert numbers(await received(reader, 1)) == [number]
            await one.apply_retention({0: 0})
        assert len(tables(postgres_url)) >= 3


async def test_a_commit_of_another_process_notifies_waiting_readers(postgres_url: str) -> None:
    async with opened(postgres_url, poll_s=1000) as one, opened(postgres_url, poll_s=1000) as two:
        reader = await two.open_receiver(0)
        async with asyncio.timeout(30):
            for number in range(3):
                await one.enqueue([(0, batch(str(number)))])
                assert await received(reader, 1) == [str(number)]


async def test_batches_are_deleted_by_age(postgres_url: str) -> None:
    async with opened(postgres_url, retain_age_s=0.05) as adapter:
        await adapter.enqueue([(0, batch("old"))])
        async with asyncio.timeout(30):
            while (await adapter.bounds(0)).first == 0:
                await adapter.apply_retention({0: 1})
        assert await adapter.bounds(0) == (1, 1)


async def test_a_long_reader_of_an_old_segment_holds_up_nobody(postgres_url: str) -> None:
    async with opened(postgres_url, retain_bytes=1, **SMALL_SEGMENTS) as adapter:
        for number in range(5):
            await adapter.enqueue([(0, large(number))])
        await adapter.apply_retention({0: 5})
        old = tables(postgres_url)[0]
        with psycopg.connect(postgres_url) as dump:
            dump.execute(f"SELECT count(*) FROM {old}".encode())
            await adapter.apply_retention({0: 5})
            assert old in tables(postgres_url)
            await adapter.enqueue([(0, large(5))])
            assert numbers(await received(await adapter.open_receiver(0, 0), 6)) == list(range(6))
        await adapter.apply_retention({0: 5})
        assert old not in tables(postgres_url)


async def test_producers_are_forgotten_after_their_time(postgres_url: str) -> None:
    limits = QUICK._replace(producer_age_s=0.001)
    async with opened(postgres_url, limits=limits) as adapter:
        await adapter.enqueue([(0, batch("x"))], sequence=ProducerSequence("p", 1, 0))
        async with asyncio.timeout(30):
            while await adapter.last_sequence("p"):
                await adapter.apply_retention({})


# ---- settings --------------------------------------------------------------------------------------------------


async def test_missing_tables_are_an_error_that_names_the_command(postgres_url: str) -> None:
    with pytest.raises(InvalidArgument, match="headrace postgres migrate URL"):
        async with opened(postgres_url, create=False):
            pass
    assert ask(postgres_url, "SELECT to_regclass('headrace_queue')") == [(None,)]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [("synchronous_commit%3Doff", "synchronous_commit = on"), ("default_transaction_read_only%3Don", "is read-only")],
)
async def test_settings_that_lose_are_refused_in_one_line(postgres_url: str, setting: str, problem: str) -> None:
    async with opened(postgres_url):
        pass
    with pytest.raises(InvalidArgument, match=problem) as caught:
        async with opened(f"{postgres_url}%20-c{setting}"):
            pass
    assert "\n" not in str(caught.value)


@pytest.mark.long
async def test_a_standby_is_refused() -> None:
    with PostgresServer() as server:
        async with opened(server.url):
            pass
        server.stop()
        (server.directory / "data" / "standby.signal").touch()
        server.start()
        with pytest.raises(InvalidArgument, match="is a standby, which is read-only: give the url of the primary"):
            async with opened(server.url):
                pass


@pytest.mark.parametrize(
    ("url", "stored"),
    [
        ("postgresql:///db", "postgresql:///db"),
        ("postgresql:///db?host=/run/pg&user=app&password=x", "postgresql:///db?host=/run/pg&user=app"),
        (
            "postgresql://me:p#w?x@[::1]:5/db?options=-csearch_path%3Db%20",
            "postgresql://me@[::1]:5/db?options=-csearch_path%3Db%20",
        ),
        ("postgresql://one:1,two:2/db?pass%77ord=x", "postgresql://one:1,two:2/db"),
        ("postgresql+psycopg://me:x@h", "postgresql+psycopg://me@h"),
        ("postgresql://me:x@h?application_name=a@b", "postgresql://me@h?application_name=a@b"),
    ],
)
def test_stored_url_has_all_but_the_password(url: str, stored: str) -> None:
    """So the provider is opened again in the same place, also over a Unix socket."""
    assert without_password(url) == stored
    there, here = conninfo_to_dict(check_url(url)), conninfo_to_dict(check_url(stored))
    assert {name: each for name, each in there.items() if name != "password"} == here


async def test_secrets_are_in_no_message_and_not_stored(postgres_url: str) -> None:
    async with opened(postgres_url) as adapter:
        assert "not-a-secret" in postgres_url
        assert "not-a-secret" not in str(adapter.location)
        assert adapter.location["url"].startswith("postgresql://headrace@127.0.0.1:")
    for url in (
        "postgresql://me:hidden@127.0.0.1:1/db",
        "mysql://me:hidden@host/db",
        "postgresql://me:hid%den@host/db",
        "postgresql://me:not@hidden@host/db",
        "postgresql://me:hidden/x@host/db",
        "postgresql://me:not@hid/den@host/db",
    ):
        with pytest.raises((InvalidArgument, StorageError)) as caught:
            async with opened(url):
                pass
        assert "hid" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "postgresql://h/other"])
def test_given_options_replace_the_stored_ones_except_the_address(url: str) -> None:
    stored: dict[str, Any] = {"url": "postgresql://h/db", "pooler": True, "retain_age_s": 5.0, "segment_bytes": 1 << 20}
    assert with_location({}, stored) == stored
    given = {"retain_bytes": 7, **({"url": url} if url else {})}
    address = {"url": url} if url else {"url": "postgresql://h/db", "pooler": True}
    assert with_location(given, stored) == {**address, "retain_bytes": 7}


async def test_an_option_of_retention_that_is_given_no_more_is_not_in_force(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    retain: dict[str, Any] = {**SMALL_SEGMENTS, "retain_bytes": 1, "retain_unfinished": False}
    async with opened(postgres_url, **retain) as adapter:
        stored = adapter.location
        assert stored["retain_bytes"] == 1
    async with opened(postgres_url, location=stored, **SMALL_SEGMENTS) as adapter:
        assert "retain_bytes" not in adapter.location
        for number in range(10):
            await adapter.enqueue([(0, large(number))])
            await adapter.apply_retention({0: 10})
        assert await adapter.bounds(0) == (0, 10)
    assert re.search(r"changes from \(.*retain_bytes = 1, .*\) to \(.*retain_unfinished = True\)", caplog.text)


async def test_queues_of_others_are_refused(postgres_url: str) -> None:
    async with opened(postgres_url, queues=2, owner="one") as adapter:
        identity = adapter.identity
    with pytest.raises(InvalidArgument, match="belongs to another control store"):
        async with opened(postgres_url, queues=2, owner="two"):
            pass
    with pytest.raises(InvalidArgument, match="has 2 queues"):
        async with opened(postgres_url, queues=3, owner="one"):
            pass
    async with opened(postgres_url, queues=2, owner="one") as again:
        assert again.identity == identity
    with pytest.raises(DataDirectoryError, match="does not have its queues"):
        async with opened(postgres_url, provider="lost", used_before=True):
            pass


async def test_a_pooler_needs_no_notifications(postgres_url: str) -> None:
    async with opened(postgres_url, pooler=True) as one, opened(postgres_url, pooler=True) as two:
        waiting = asyncio.ensure_future((await two.open_receiver(0)).receive(ANY, ANY))
        await one.enqueue([(0, batch("x"))])
        assert texts((await asyncio.wait_for(waiting, 20)).batches) == ["x"]
        assert ask(postgres_url, "SELECT count(*) FROM pg_listening_channels()") == [(0,)]


async def test_names_with_any_characters_are_stored(postgres_url: str) -> None:
    stream = StreamId("näm'e\x00", "k\\ey';--")
    async with opened(postgres_url, provider="pro'vider") as adapter:
        call = [(0, EventBatch.of(stream, [b"x"]))]
        for _ in range(2):
            await adapter.enqueue(call, sequence=ProducerSequence("p'\x00\\", 1, 0))
        (found,) = (await (await adapter.open_receiver(0)).receive(ANY, ANY)).batches
        assert found.stream == stream
        assert await adapter.last_sequence("p'\x00\\") == 1


async def test_a_role_that_may_create_no_tables_any_more_publishes_and_is_told_what_to_grant(postgres_url: str) -> None:
    """Each segment is a table. Retention begins it, so the last segment grows meanwhile."""
    ((schema,),) = ask(postgres_url, "SELECT current_schema()")
    role = f"limited_{schema}"
    ask(postgres_url, f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    ask(postgres_url, f"GRANT USAGE, CREATE ON SCHEMA {schema} TO {role}")
    limited = make_url(postgres_url).set(username=role, password="x").render_as_string(hide_password=False)
    async with opened(limited, **SMALL_SEGMENTS) as adapter:
        ask(postgres_url, f"REVOKE CREATE ON SCHEMA {schema} FROM {role}")
        await adapter.enqueue([(0, large(number)) for number in range(8)])
        with pytest.raises(StorageError, match="grant this role CREATE on the schema"):
            await adapter.apply_retention({0: 0})
        await adapter.enqueue([(0, large(8))])
        assert len(tables(postgres_url)) == 1
        ask(postgres_url, f"GRANT CREATE ON SCHEMA {schema} TO {role}")
        await adapter.apply_retention({0: 0})
        assert len(tables(postgres_url)) == 2
        await adapter.enqueue([(0, large(9))])
        assert numbers(await received(await adapter.open_receiver(0, 0), 10)) == list(range(10))
    ask(postgres_url, f"DROP OWNED BY {role} CASCADE")
    ask(postgres_url, f"DROP ROLE {role}")
