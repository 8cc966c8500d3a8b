"""Reading over gRPC: the same batches as from the data directory, over the end of any silo, and nothing forbidden."""

import asyncio
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from headrace import (
    Closed,
    Event,
    EventBatch,
    HeadraceError,
    InvalidArgument,
    NotSupported,
    PermissionDenied,
    Selector,
    StreamId,
    Unauthenticated,
    Unavailable,
)
from headrace.client.connection import GrpcTransport
from headrace.pipeline.access import BatchChunk, LogAccess, QueueAccess
from headrace.pipeline.place import ProviderPlace
from headrace.pipeline.remote import RemoteAccess, chunk_of
from headrace.pipeline.source import HeadraceSource
from headrace.silo.provider import Provider
from headrace.streams.errors import OffsetsGone
from tests.client.silos import SiloProcess
from tests.silo.services.calling import Allowed, batch, connecting, make_tokens, opened
from tests.silo.services.test_reader import ONE_QUEUE, adapter_of, damage

ALL = Selector("*/*")
MIB = 1 << 20


@contextmanager
def remote(address: str, *, outage_s: float = 60.0, **options: Any) -> Generator[RemoteAccess]:
    with closing(RemoteAccess(GrpcTransport(address, **options), "default", outage_s=outage_s)) as access:
        yield access


@pytest.fixture
def silos(tmp_path: Path) -> Iterator[Callable[[], SiloProcess]]:
    """Start silos, on the same data directory; killed at the end of the test."""
    started: list[SiloProcess] = []

    def start() -> SiloProcess:
        started.append(SiloProcess(tmp_path))
        started[-1].start()
        return started[-1]

    yield start
    for silo in started:
        silo.kill()


def fill(data: Path, *batches: EventBatch, queues: int = 1) -> None:
    """Each batch in the next queue, by a process that is not there any more."""

    async def publish() -> None:
        async with Provider.open(data / "d", queues=queues) as provider:
            for first in range(0, len(batches), 1000):
                some = enumerate(batches[first : first + 1000], first)
                await provider.adapter.enqueue([(number % queues, each) for number, each in some])

    asyncio.run(publish())


def of(key: str, *events: bytes | Event) -> EventBatch:
    return EventBatch.of(StreamId("n", key), events)


def taken(chunks: Iterable[BatchChunk]) -> list[tuple[int, bytes, int, int]]:
    """Return the offset, bytes, length of the name, and number of events of each batch."""
    return [
        (offset, chunk.source[start:end], prefix, count)
        for chunk in chunks
        for offset, start, end, prefix, count in zip(
            *(column.tolist() for column in (chunk.offsets, chunk.starts, chunk.ends, chunk.prefixes, chunk.counts)),
            strict=True,
        )
    ]


def everything(access: QueueAccess, queue: int = 0, selector: Selector = ALL) -> list[tuple[int, bytes, int, int]]:
    state = access.states()[queue]
    return taken(access.read(queue, state.first, state.next, selector))


# The same as in the data directory


def test_a_silo_returns_the_rows_of_its_data_directory(tmp_path: Path, silos: Callable[[], SiloProcess]):
    sizes = [0, 1, 90, 100, 110, 127, 128, 16_000, 16_384, 300_000, MIB]
    with_more = Event(b"x" * 40, headers={"a": "b"}, id="id")
    batches = [of(f"key{number % 7}" * (number % 50), *[os.urandom(size)] * 3) for number, size in enumerate(sizes * 4)]
    fill(tmp_path, *batches, of("more", with_more, b""), of("many", *[b"e"] * 5000), queues=3)
    silo = silos()
    with remote(silo.address) as access, closing(LogAccess(silo.data, "default")) as log:
        assert access.queues == log.queues == 3
        assert list(access.states()) == list(log.states())
        for time_us in (0, 1 << 57):
            assert list(access.offsets_at(time_us)) == list(log.offsets_at(time_us))
        for queue, state in enumerate(log.states()):
            assert everything(access, queue) == everything(log, queue)
            middle = state.next // 2
            assert taken(access.read(queue, middle, middle + 3, ALL)) == everything(log, queue)[middle : middle + 3]
            for limits in ((None, None), (1, None), (10, None), (None, MIB), (100, 1000)):
                reached = access.end_within(queue, 0, state.next, *limits)
                assert reached == log.end_within(queue, 0, state.next, *limits)
        assert taken(access.read(0, 1, 1, ALL)) == []


def test_only_selected_events_are_read(tmp_path: Path, silos: Callable[[], SiloProcess]):
    fill(tmp_path, *(of(f"{number % 10}", b"%d" % number) for number in range(200)))
    with remote(silos().address) as access:
        assert [offset for offset, *_ in everything(access, 0, Selector("n/3"))] == list(range(3, 200, 10))
        assert everything(access, 0, Selector("other/*")) == []


def test_small_batches_come_many_at_a_time(tmp_path: Path, silos: Callable[[], SiloProcess]):
    fill(tmp_path, *(of("k", b"x" * 100) for _ in range(20_000)))
    with remote(silos().address) as access:
        chunks = list(access.read(0, 0, 20_000, ALL))
        assert len(chunks) < 10
        assert [offset for offset, *_ in taken(chunks)] == list(range(20_000))


# Silos that come and go


def large(tmp_path: Path) -> int:
    """Store more batches than are in flight at once. Return their number."""
    fill(tmp_path, *(of(f"{number % 5}", os.urandom(100_000)) for number in range(600)))
    return 600


def offsets_over(chunks: Iterator[BatchChunk], after: int, then: Callable[[], object]) -> list[int]:
    """Read on to the end, and when so many batches have come, do something."""
    offsets: list[int] = []
    done = False
    for chunk in chunks:
        offsets += chunk.offsets.tolist()
        if not done and len(offsets) >= after:
            then()
            done = True
    assert done
    return offsets


@pytest.mark.long
@pytest.mark.parametrize("end", [SiloProcess.kill, SiloProcess.stop], ids=["killed", "stopped"])
def test_another_silo_goes_on(tmp_path: Path, silos: Callable[[], SiloProcess], end: Callable[[SiloProcess], None]):
    total = large(tmp_path)
    first, second = silos(), silos()
    with remote(f"{first.address},{second.address}") as access:
        offsets = offsets_over(access.read(0, 0, total, ALL), 50, partial(end, first))
        assert offsets == list(range(total))
        assert len(access.states()) == 1


def test_a_silo_that_comes_back_goes_on(tmp_path: Path, silos: Callable[[], SiloProcess]):
    total = large(tmp_path)
    silo = silos()

    def again() -> None:
        silo.kill()
        silo.start()

    with remote(silo.address) as access:
        assert offsets_over(access.read(0, 0, total, ALL), 50, again) == list(range(total))


def test_an_outage_that_lasts_ends_it(tmp_path: Path, silos: Callable[[], SiloProcess]):
    total = large(tmp_path)
    silo = silos()
    with remote(silo.address, outage_s=0.3) as access:
        with pytest.raises(Unavailable):
            offsets_over(access.read(0, 0, total, ALL), 50, silo.kill)
        with pytest.raises(Unavailable):
            access.states()


def test_read_left_in_the_middle_may_begin_again(tmp_path: Path, silos: Callable[[], SiloProcess]):
    total = large(tmp_path)
    with remote(silos().address) as access:
        for _ in range(3):
            chunks = access.read(0, 0, total, ALL)
            assert next(chunks).offsets[0] == 0
        assert next(access.read(0, 5, total, ALL)).offsets[0] == 5
        last = access.read(0, 0, total, ALL)
        next(last)
    with pytest.raises(Closed):
        list(last)
    with pytest.raises(Closed):
        access.states()


# Refused reads


async def test_removed_offsets_are_named_with_the_offsets_left(tmp_path: Path):
    provider = {"queues": 1, "options": {"retain_bytes": 1}}
    async with opened(tmp_path, provider=provider) as silo:
        for _ in range(3):
            await adapter_of(silo).enqueue([(0, of("k", b"x"))])
        await adapter_of(silo).apply_retention({})
        await asyncio.to_thread(_meets_gone, silo.grpc_address or "")


def _meets_gone(address: str) -> None:
    with remote(address) as access:
        (state,) = access.states()
        assert state.first > 0
        for call in (lambda: list(access.read(0, 0, 3, ALL)), lambda: access.end_within(0, 0, 3, 1, None)):
            with pytest.raises(OffsetsGone) as caught:
                call()
            assert (caught.value.queue, caught.value.start, caught.value.first) == (0, 0, state.first)


async def test_events_before_a_damaged_record_are_read(tmp_path: Path):
    async with opened(tmp_path, provider=ONE_QUEUE) as silo:
        for number in range(3):
            await adapter_of(silo).enqueue([(0, of("k", b"%d" % number))])
        await asyncio.to_thread(damage, silo, 2)
        offsets, error = await asyncio.to_thread(_read_to_the_error, silo.grpc_address or "", 3)
        assert offsets == [0, 1]
        assert error.code == "corrupt_record"
        assert "queue 0, offset 2" in str(error)


def _read_to_the_error(address: str, end: int) -> tuple[Sequence[int], HeadraceError]:
    offsets: list[int] = []
    with remote(address) as access:
        try:
            for chunk in access.read(0, 0, end, ALL):
                offsets += chunk.offsets.tolist()
        except HeadraceError as error:
            return offsets, error
    raise AssertionError("it was read to the end")


async def test_a_token_opens_only_the_streams_that_it_allows(tmp_path: Path):
    tokens = await make_tokens(tmp_path, all=Allowed(["*"], ["*"]), shop=Allowed(subscribe=["shop", "new"]))
    async with opened(tmp_path, provider=ONE_QUEUE, auth="tokens") as silo:
        address = silo.grpc_address or ""
        async with connecting(address, tokens["all"]) as caller:
            await caller.publish(*(batch(f"{space}/a", b"x") for space in ("shop", "bank", "shop")))
        await asyncio.to_thread(_plans, {"server": address, "token": tokens["shop"]})
        await asyncio.to_thread(_reads_its_own, address, tokens["shop"])


def _plans(options: dict[str, str]) -> None:
    """Also plan for an empty namespace: the caller may not know which other namespaces exist."""
    for namespace in ("shop", "new"):
        assert len(_parts({**options, "namespace": namespace})) == 1
    with pytest.raises(PermissionDenied):
        _parts({**options, "namespace": "bank"})
    ProviderPlace.of(options).open().close()


def _parts(options: dict[str, str]) -> Sequence[object]:
    schema = StructType([StructField("namespace", StringType())])
    return HeadraceSource({**options, "columns": "namespace"}).reader(schema).partitions()


def _reads_its_own(address: str, token: str) -> None:
    with remote(address, token=token) as access:
        (state,) = access.states()
        assert (state.next, state.events, state.nbytes) == (3, None, None)
        assert [offset for offset, *_ in everything(access, 0, Selector("shop/*"))] == [0, 2]
        assert access.end_within(0, 0, 3, 1, None) == 2
        for selector in ("*/*", "bank/*"):
            with pytest.raises(PermissionDenied):
                everything(access, 0, Selector(selector))
    for wrong in (None, f"{token}x"):
        with pytest.raises(Unauthenticated):
            RemoteAccess(GrpcTransport(address, token=wrong), "default")


async def test_an_adapter_that_cannot_go_back_is_refused():
    async with opened(None, provider={"adapter": "memory"}) as silo:
        connection = GrpcTransport(silo.grpc_address or "")
        with pytest.raises(NotSupported, match="'default' cannot be read by ranges of offsets"):
            await asyncio.to_thread(RemoteAccess, connection, "default")


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x0a",
        b"\x12",
        b"\x12\x06\x08\x01\x12\x02\x00\x00",
        b"\x12\x04\x12\x04\x01\x00",
        b"\x12\x05\x12\x04" + bytes(3),
    ],
)
def test_a_damaged_response_is_refused(message: bytes):
    with pytest.raises(InvalidArgument, match=r"damaged message: \d+ bytes that are no headrace.v1.ReadResponse"):
        chunk_of(message)
