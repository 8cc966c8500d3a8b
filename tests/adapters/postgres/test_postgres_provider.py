"""The rest of headrace over PostgreSQL: subscriptions, failures, delays, outbox, consumers over the network, silos."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from headrace import Client, Event, EventBatch, Outbox, Provider, RetryPolicy, Selector, Start, StreamId
from headrace.client.connection import GrpcTransport
from headrace.effects import schema
from headrace.pipeline.remote import RemoteAccess
from headrace.silo.options import ProviderOptions
from tests.adapters.postgres.opening import replace_end, tables
from tests.client.silos import SiloProcess


class Collector:
    """A handler that keeps payloads, and refuses the one that it is told to refuse."""

    def __init__(self, poison: bytes = b"") -> None:
        self.found: list[bytes] = []
        self._poison = poison

    async def __call__(self, event: Event) -> None:
        if event.payload == self._poison:
            raise ValueError("poison")
        self.found.append(event.payload)


@pytest.fixture
def postgres(postgres_url: str) -> dict[str, Any]:
    """Keywords of `Provider.open`."""
    return {"adapter": "postgres", "queues": 2, "options": {"url": postgres_url, "create": True}}


async def test_events_are_delivered_in_order_and_positions_outlive_the_process(
    postgres: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Provider.open(tmp_path, **postgres) as provider:
        first = Collector()
        subscription = await provider.subscribe("s", "orders/*", first)
        for number in range(20):
            await provider.stream("orders", str(number % 3)).publish(str(number).encode())
        await subscription.caught_up()
        for key in range(3):
            mine = [int(payload) for payload in first.found if int(payload) % 3 == key]
            assert mine == list(range(key, 20, 3))
    monkeypatch.setenv("PGPASSWORD", "not-a-secret")  # the control store has the rest of the url
    async with Provider.open(tmp_path) as provider:
        second = Collector()
        subscription = await provider.subscribe("s", "orders/*", second)
        await provider.stream("orders", "0").publish(b"new")
        await subscription.caught_up()
        assert second.found == [b"new"]
        replayed = Collector()
        replay = await provider.subscribe("again", "orders/*", replayed, start=Start.earliest())
        await replay.caught_up()
        assert len(replayed.found) == 21


async def test_poison_becomes_a_dead_letter_and_holds_up_no_other_stream(
    postgres: dict[str, Any], tmp_path: Path
) -> None:
    async with Provider.open(tmp_path, **postgres) as provider:
        collector = Collector(b"poison")
        subscription = await provider.subscribe("s", "orders/*", collector, retry=RetryPolicy(max_attempts=1))
        for key in range(4):
            for payload in (b"before", b"poison" if key == 1 else b"fine", b"after"):
                await provider.stream("orders", str(key)).publish(payload)
        await subscription.caught_up()
        assert sorted(collector.found) == sorted([b"before"] * 4 + [b"fine"] * 3 + [b"after"] * 4)
        (letter,) = await provider.dead_letters("s")
        assert letter.payload == b"poison"


async def test_retention_below_a_subscription_is_one_gap_record(postgres: dict[str, Any], tmp_path: Path) -> None:
    postgres["queues"] = 1
    postgres["options"] |= {"segment_bytes": 1 << 16, "retain_bytes": 1, "retain_unfinished": False}
    async with Provider.open(tmp_path, **postgres) as provider:
        await (await provider.subscribe("s", "orders/*", Collector())).caught_up()
    async with Provider.open(tmp_path, **postgres) as provider:
        for number in range(10):
            await provider.stream("orders", "1").publish(b"%d" % number + bytes(20_000))
            await provider.adapter.apply_retention({})
        first = (await provider.adapter.bounds(0)).first
        assert first > 0
        collector = Collector()
        subscription = await provider.subscribe("s", "orders/*", collector)
        await subscription.caught_up()
        assert [payload[:1] for payload in collector.found] == [b"%d" % number for number in range(first, 10)]
        async with asyncio.timeout(30):
            while not (gaps := await provider.gaps("s")):  # noqa: ASYNC110 (it is stored in the background)
                await asyncio.sleep(0.05)
        (gap,) = gaps
        assert (gap.low.offset, gap.high.offset) == (0, first)


async def test_new_events_of_a_queue_that_lost_its_end_are_delivered_after_the_seek_that_the_fault_names(
    postgres: dict[str, Any],
    tmp_path: Path,
    postgres_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    postgres["queues"] = 1
    async with Provider.open(tmp_path, **postgres) as provider:
        subscription = await provider.subscribe("s", "orders/*", Collector(), start=Start.earliest())
        stream = provider.stream("orders", "1")
        for number in range(10):
            await stream.publish(b"%d" % number)
        await subscription.caught_up()
        replace_end(postgres_url, 7)
        for number in range(7, 15):
            await stream.publish(b"new %d" % number)
        async with asyncio.timeout(30):
            while not (fault := re.search(r"offsets from 7 to 9 .* back to (\S+), and start", caplog.text)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    monkeypatch.setenv("PGPASSWORD", "not-a-secret")
    async with Provider.open(tmp_path) as provider:
        await provider.seek("s", Start.parse(fault[1]))
        collector = Collector()
        subscription = await provider.subscribe("s", "orders/*", collector, start=Start.earliest())
        await subscription.caught_up()
        assert collector.found == [b"new %d" % number for number in range(7, 15)]


async def test_delayed_events_wait_in_the_control_store(postgres: dict[str, Any], tmp_path: Path) -> None:
    async with Provider.open(tmp_path, delays="store", **postgres) as provider:
        collector = Collector()
        await provider.subscribe("s", "orders/*", collector)
        stream = provider.stream("orders", "1")
        await stream.publish(b"later", delay=timedelta(milliseconds=300))
        await stream.publish(b"now")
        async with asyncio.timeout(30):
            while len(collector.found) < 2:  # noqa: ASYNC110 (the handler is called in its own time)
                await asyncio.sleep(0.02)
        assert collector.found == [b"now", b"later"]


async def test_control_store_effects_outbox_and_queues_share_one_schema(
    postgres: dict[str, Any], tmp_path: Path, postgres_url: str
) -> None:
    engine = create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"))
    try:
        with engine.begin() as connection:
            schema.migrate(connection)
        stream = StreamId("orders", "1")
        options = ProviderOptions(outbox=postgres_url, **postgres)
        async with aclosing(await Provider.start(tmp_path, options, control=postgres_url)) as provider:
            collector = Collector()
            await provider.subscribe("s", "orders/*", collector)

            def publish(payload: bytes, *, commit: bool) -> None:
                with engine.connect() as connection:
                    Outbox().publish(stream, payload, connection=connection)
                    if commit:
                        connection.commit()

            for number in range(10):
                await asyncio.to_thread(publish, b"%d" % number, commit=number % 3 != 1)
            async with asyncio.timeout(30):
                while len(collector.found) < 7:  # noqa: ASYNC110 (the mover works in its own time)
                    await asyncio.sleep(0.02)
        assert collector.found == [b"%d" % number for number in range(10) if number % 3 != 1]
        assert tables(postgres_url)
    finally:
        engine.dispose()


async def test_two_silos_share_the_queues(postgres_url: str, tmp_path: Path) -> None:
    config = ['data = "d"', "[providers.default]", 'adapter = "postgres"', "queues = 4"]
    options = f'options = {{ url = "{postgres_url}", create = true }}'
    (tmp_path / "silo.toml").write_text("\n".join([*config, options]))
    silos = SiloProcess(tmp_path, "silo.toml", "--workers", "2")
    address = await asyncio.to_thread(silos.start)
    host, _, port = address.rpartition(":")
    try:
        async with Client(f"{address},{host}:{int(port) + 1}") as client:
            for number in range(100):
                await client.publish(StreamId("orders", str(number % 10)), b"%d" % number)
            found: dict[str, list[int]] = {}
            async with asyncio.timeout(60), client.subscribe("s", "orders/*", start="earliest") as consumer:
                async for delivered in consumer:
                    found.setdefault(delivered.stream.key, []).extend(map(int, delivered.payloads()))
                    await delivered.ack()
                    if sum(map(len, found.values())) == 100:
                        break
        assert found == {str(key): list(range(key, 100, 10)) for key in range(10)}
    finally:
        await asyncio.to_thread(silos.kill)


async def test_consumers_and_spark_ranges_work_over_the_network(
    postgres: dict[str, Any], postgres_url: str, tmp_path: Path
) -> None:
    async with Provider.open(tmp_path / "d", **postgres):
        pass
    config = ['data = "d"', "[providers.default]", 'adapter = "postgres"', f'options = {{ url = "{postgres_url}" }}']
    (tmp_path / "silo.toml").write_text("\n".join(config))
    silo = SiloProcess(tmp_path, "silo.toml")
    try:
        address = await asyncio.to_thread(silo.start)
        async with Client(address) as client:
            await client.stream("orders", "1").publish([str(number).encode() for number in range(20)])
            found: list[bytes] = []
            async with client.subscribe("s", "orders/*", start="earliest") as consumer:
                async for delivered in consumer:
                    found += delivered.payloads()
                    await delivered.ack()
                    if len(found) == 20:
                        break
            assert found == [str(number).encode() for number in range(20)]

        def read() -> list[bytes]:
            with closing(RemoteAccess(GrpcTransport(address), "default", outage_s=30.0)) as access:
                found: list[bytes] = []
                for queue, state in enumerate(access.states()):
                    for chunk in access.read(queue, 0, state.next, Selector("*/*")):
                        for start, stop in zip(chunk.starts.tolist(), chunk.ends.tolist(), strict=True):
                            found += EventBatch.decode(chunk.source[start:stop]).payloads()
                return found

        assert await asyncio.to_thread(read) == found
    finally:
        await asyncio.to_thread(silo.kill)
