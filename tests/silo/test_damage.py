"""Damaged records of a log: shown with queue and offsets, skipped by a command, and readers continue after them."""

import asyncio
import json
import shlex
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from headrace import Client, CorruptRecord, Event, Start, SubscriptionDefinition
from headrace.client.connection import GrpcTransport
from headrace.pipeline.access import LogAccess
from headrace.pipeline.remote import RemoteAccess
from headrace.silo.provider import Provider
from headrace.silo.repair import skip_damage
from headrace.streams.identity import SequenceToken
from headrace.streams.subscriptions import Checkpoint, Selector, StreamBehind
from tests.cli.commandline import Headrace
from tests.silo.services.test_reader import end_within, one_queue, read

PAYLOADS = [b"0", b"1", b"2", b"3", b"4"]
MISSED = "damaged, and skipped by an operator (its checksum does not match)"


def damage(data: Path, *offsets: int, byte: int = -1) -> None:
    """Flip bits of the blocks that begin at these offsets of the only queue."""
    with lmdb.open(str(data / "providers" / "default" / "log"), max_dbs=10, map_size=1 << 30) as environment:
        blocks = environment.open_db(b"queue-00000")
        with environment.begin(write=True, db=blocks) as txn:
            for offset in offsets:
                key = offset.to_bytes(8, "big")
                record = bytearray(txn.get(key, b""))
                record[byte] ^= 0xFF
                txn.put(key, bytes(record))


def remove(data: Path, offset: int) -> None:
    with lmdb.open(str(data / "providers" / "default" / "log"), max_dbs=10, map_size=1 << 30) as environment:
        blocks = environment.open_db(b"queue-00000")
        with environment.begin(write=True, db=blocks) as txn:
            txn.delete(offset.to_bytes(8, "big"))


async def make(data: Path, payloads: Iterable[bytes] = PAYLOADS) -> None:
    """One block for each payload, and a subscription `past` that has done all of them."""
    async with Provider.open(data, queues=1) as provider:
        for payload in payloads:
            await provider.stream("orders", payload.decode()).publish(payload)
        subscription = await provider.subscribe("past", "orders/*", Got(), start="earliest")
        await subscription.caught_up()
        await provider.create_subscription(from_earliest("waits"))


def from_earliest(name: str) -> SubscriptionDefinition:
    return SubscriptionDefinition(name=name, selector=Selector("orders/*"), start=Start.earliest())


class Got(list[bytes]):
    """A handler that collects payloads."""

    def __init__(self) -> None:
        self.last = asyncio.Event()

    async def on_next(self, event: Event) -> None:
        self.append(event.payload)
        if event.payload == PAYLOADS[-1]:
            self.last.set()


async def gaps(provider: Provider, name: str) -> list[tuple[int, int, str]]:
    return [(gap.low.offset, gap.high.offset, gap.reason) for gap in await provider.store.gaps("default", name)]


async def test_catching_up_ends_at_a_damaged_record_when_all_before_it_is_done(tmp_path: Path):
    await make(tmp_path)
    await asyncio.to_thread(damage, tmp_path, 2)
    async with Provider.open(tmp_path) as provider:
        got = Got()
        subscription = await provider.subscribe("waits", "orders/*", got, start="earliest")
        with pytest.raises(CorruptRecord, match="queue 0, offset 2: the stored record is damaged") as caught:
            await subscription.caught_up()
        assert got == [b"0", b"1"]
        assert (caught.value.queue, caught.value.offset, caught.value.next_offset) == (0, 2, 3)
        (queue,) = provider.statistics().queues
        assert (queue.state, queue.reason) == ("faulted", str(caught.value))
        past = await provider.subscribe("past", "orders/*", Got(), start="earliest")
        await past.caught_up()  # it is behind the damage already


async def test_a_damaged_range_is_skipped_while_a_process_serves_its_subscriptions(tmp_path: Path):
    await make(tmp_path)
    await asyncio.to_thread(damage, tmp_path, 1, 2)
    async with Provider.open(tmp_path) as provider:
        got = Got()
        subscription = await provider.subscribe("waits", "orders/*", got, start="earliest")
        await provider.subscribe("past", "orders/*", Got(), start="earliest")
        with pytest.raises(CorruptRecord):
            await subscription.caught_up()
        skipped = await skip_damage(tmp_path, "default", 0)
        assert [(one.low, one.high) for one in skipped.damages] == [(1, 3)]
        assert (skipped.noted, skipped.serving) == ([], ["past", "waits"])
        await got.last.wait()
        assert got == [b"0", b"3", b"4"]
        await subscription.caught_up()
        (queue,) = provider.statistics().queues
        assert queue.state == "running"
    async with Provider.open(tmp_path) as provider:
        assert await gaps(provider, "waits") == [(1, 3, MISSED)]
        assert await gaps(provider, "past") == []


async def test_readers_of_every_kind_continue_after_a_skipped_range_also_after_a_restart(tmp_path: Path):
    await make(tmp_path)
    await asyncio.to_thread(damage, tmp_path, 2)
    skipped = await skip_damage(tmp_path, "default", 0)
    assert (skipped.noted, skipped.serving) == (["waits"], [])
    for expected in ([b"0", b"1", b"3", b"4"], []):
        assert (await skip_damage(tmp_path, "default", 0)).damages == []
        async with Provider.open(tmp_path) as provider:
            got, late = Got(), Got()
            subscription = await provider.subscribe("waits", "orders/*", got, start="earliest")
            await subscription.caught_up()
            assert got == expected
            assert await gaps(provider, "waits") == [(2, 3, MISSED)]
            await (await provider.subscribe("late", "orders/*", late, start="earliest")).caught_up()
            assert late == [b"0", b"1", b"3", b"4"]
            await provider.withdraw("late")
            assert await gaps(provider, "late") == [(2, 3, MISSED)]
            await provider.delete_subscription("late")
    async with Provider.open(tmp_path) as provider:
        statistics = await provider.adapter.statistics(0)
        assert (statistics.bounds, statistics.events) == ((0, 5), 4)
        assert await provider.adapter.end_within(0, 0, 5, 3, None) == 4
        backlog = await provider.adapter.backlog(0, 0)
        assert (backlog.batches, backlog.events) == (5, 4)
        assert await gaps(provider, "past") == []
    assert await asyncio.to_thread(offsets_read, tmp_path) == ([0, 1, 3, 4], [(2, 3)])


async def test_a_missing_block_is_skipped_too(tmp_path: Path):
    await make(tmp_path)
    await asyncio.to_thread(remove, tmp_path, 3)
    skipped = await skip_damage(tmp_path, "default", 0)
    assert [(one.low, one.high, one.why) for one in skipped.damages] == [(3, 4, "the block is missing")]
    async with Provider.open(tmp_path) as provider:
        got = Got()
        await (await provider.subscribe("waits", "orders/*", got, start="earliest")).caught_up()
    assert got == [b"0", b"1", b"2", b"4"]


async def test_retention_deletes_skipped_blocks(tmp_path: Path):
    await make(tmp_path)
    await asyncio.to_thread(damage, tmp_path, 0)
    await skip_damage(tmp_path, "default", 0)
    async with Provider.open(tmp_path, options={"retain_age_s": 1e-6, "retain_unfinished": False}) as provider:
        await provider.adapter.apply_retention({})
        assert (await provider.adapter.statistics(0)) == ((5, 5), 0, 0)


async def test_a_subscription_with_a_stream_before_the_damage_gets_a_gap_record(tmp_path: Path):
    """Its checkpoint is behind the damage, and the stream may have events in it."""
    await make(tmp_path)
    async with Provider.open(tmp_path) as provider:
        stream = provider.stream("orders", "1").id
        behind = {0: Checkpoint(5, {stream: StreamBehind(SequenceToken(1), "poison")})}
        await provider.store.seek("default", "past", behind, "test")
    await asyncio.to_thread(damage, tmp_path, 2)
    assert (await skip_damage(tmp_path, "default", 0)).noted == ["past", "waits"]


async def test_damaged_records_of_several_subscriptions_do_not_hold_up_another_that_is_behind(tmp_path: Path):
    """A queue has four places for those that catch up."""
    await make(tmp_path)
    async with Provider.open(tmp_path) as provider:
        for number in range(5):
            await provider.create_subscription(from_earliest(f"stuck-{number}"))
        await provider.store.seek("default", "waits", {0: Checkpoint(3)}, "test")
    await asyncio.to_thread(damage, tmp_path, 1)
    async with Provider.open(tmp_path) as provider:
        await provider.subscribe("past", "orders/*", Got(), start="earliest")
        stuck = [await provider.subscribe(f"stuck-{n}", "orders/*", Got(), start="earliest") for n in range(5)]
        for each in stuck:
            with pytest.raises(CorruptRecord):
                await each.caught_up()
        got = Got()
        await (await provider.subscribe("waits", "orders/*", got, start="earliest")).caught_up()
        assert got == [b"3", b"4"]


def offsets_read(data: Path) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the offsets of the queue that the pipeline reads, and the ranges that it knows to be skipped."""
    access = LogAccess(data, "default")
    try:
        chunks = list(access.read(0, 0, 5, Selector("*/*")))
        return [int(offset) for chunk in chunks for offset in chunk.offsets], list(access.skipped(0, 0, 5))
    finally:
        access.close()


@pytest.mark.long
def test_commands_show_the_damage_and_exit_with_1(tmp_path: Path, headrace: Headrace):
    data = ("--data", "a d")
    for payload in (b"0\n", b"1\n", b"2\n"):
        headrace("publish", *data, "--queues", 1, "--stream", "orders/1", stdin=payload)
    headrace("subscriptions", "create", *data, "--from", "earliest", "s", "orders/*")
    damage(tmp_path / "a d", 1)
    line = "queue 0, offset 1: the stored record is damaged (its checksum does not match): skip it with"
    way = f"`headrace repair queue --data '{tmp_path / 'a d'}' --provider default 0`"

    subscribe = ("subscribe", *data, "--name", "s", "--no-follow", "--format", "raw", "orders/*")
    read = headrace(*subscribe)
    assert (read.code, read.out) == (1, "0\n")
    assert read.err == f"headrace: {line} {way}\n"
    for command in ("streams", "queues"):
        shown = headrace(command, *data, "--json")
        assert (shown.code, shown.err) == (1, f"headrace: {line} {way}\n")
        (document,) = json.loads(shown.out)
        assert document["events"] == (2 if command == "streams" else 3)

    shown = headrace("subscriptions", "list", *data, "--json")
    assert (shown.code, shown.err) == (1, f"headrace: subscription 's': {line} {way}\n")
    (document,) = json.loads(shown.out)
    assert document["faults"] == [f"{line} {way}"]
    shown = headrace("subscriptions", "show", *data, "s", "--json")
    assert (shown.code, shown.err) == (1, f"headrace: subscription 's': {line} {way}\n")
    assert json.loads(shown.out)["queues"]["0"]["fault"] == f"{line} {way}"

    skipped = headrace(*shlex.split(way.strip("`"))[1:])
    assert skipped.err.splitlines() == [
        "headrace: queue 0: skipped offset 1 (its checksum does not match)",
        "headrace: subscription 's' has a gap record",
    ]
    assert headrace("queues", *data).code == 0
    (document,) = headrace("subscriptions", "list", *data, "--json").json
    assert document["faults"] == []
    assert headrace("subscriptions", "show", *data, "s", "--json").json["queues"]["0"]["fault"] is None
    read = headrace(*subscribe)
    assert (read.code, read.out) == (0, "2\n")
    read = headrace("subscribe", *data, "--from", "earliest", "--no-follow", "orders/*")
    assert " misses offsets 1 to 1 of queue 0: damaged" in read.err


async def test_a_silo_shows_the_damage_at_which_a_subscription_stands(tmp_path: Path, headrace: Headrace):
    await make(tmp_path / "data")
    await asyncio.to_thread(damage, tmp_path / "data", 0)
    async with one_queue(tmp_path / "data") as (silo, _):
        server = ("--server", silo.grpc_address)
        line = "subscription 'waits': queue 0, offset 0: the stored record is damaged (its checksum does not match)"
        listed = await asyncio.to_thread(headrace, "subscriptions", "list", *server)
        assert (listed.code, listed.err.startswith(f"headrace: {line}: ")) == (1, True)
        assert len(listed.err.splitlines()) == 1  # the other one is behind the damage
        shown = await asyncio.to_thread(headrace, "subscriptions", "show", *server, "waits")
        assert (shown.code, shown.err) == (1, listed.err)
        assert (await asyncio.to_thread(headrace, "subscriptions", "show", *server, "past")).code == 0


async def test_silos_read_on_after_a_skipped_range(tmp_path: Path):
    await make(tmp_path / "data")
    await asyncio.to_thread(damage, tmp_path / "data", 2)
    async with one_queue(tmp_path / "data") as (silo, caller):
        damaged = await read(caller, 5)
        assert damaged.refused is not None
        assert "queue 0, offset 2: the stored record is damaged" in str(damaged.refused)
        async with Client(silo.grpc_address or "") as client:
            async with client.subscribe("waits", "orders/*", start="earliest") as consumer:
                first, second = await anext(consumer), await anext(consumer)
                await first.ack()
                await second.ack()
                with pytest.raises(CorruptRecord, match="queue 0, offset 2"):
                    await consumer.caught_up()
                await skip_damage(tmp_path / "data", "default", 0)
                assert [event.payload for event in (await anext(consumer)).events()] == [b"3"]
        whole = await read(caller, 5)
        assert (whole.refused, [offset for _, _, offset in whole.batches]) == (None, [0, 1, 3, 4])
        assert await end_within(caller, 0, 5, max_events=3) == 4
        assert await asyncio.to_thread(skipped_at, silo.grpc_address or "") == [[(2, 3)], [], []]


def skipped_at(address: str) -> list[Sequence[tuple[int, int]]]:
    """The skipped ranges that a silo tells the pipeline of: from 0 to 5, from 0 to 2, and from 3 to 5."""
    with closing(RemoteAccess(GrpcTransport(address), "default")) as access:
        return [access.skipped(0, start, end) for start, end in ((0, 5), (0, 2), (3, 5))]
