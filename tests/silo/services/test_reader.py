"""Reading queues by ranges over gRPC: stored events come as published, and no events that the caller may not read."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace import EventBatch, StreamId
from headrace.adapters import QueueAdapter
from headrace.proto.v1 import reader_pb2 as pb
from headrace.server.config import GrpcConfig
from headrace.silo.config import ProviderConfig, SiloConfig
from headrace.silo.host import Silo
from headrace.silo.service_limits import ServiceLimits
from headrace.silo.services import reader
from headrace.streams.frames import split
from tests.silo.clusters import clustered
from tests.silo.services.calling import Allowed, Caller, Refused, Stream, batch, connecting, make_tokens, opened
from tests.silo.services.sessions import eventually

READER = "headrace.v1.ReaderService"
ONE_QUEUE = {"queues": 1}


class Read(NamedTuple):
    """The outcome of a call: the responses in their order, and the refusal if there was one."""

    messages: Sequence[bytes]
    refused: Refused | None

    @property
    def responses(self) -> list[pb.ReadResponse]:
        return [pb.ReadResponse.FromString(message) for message in self.messages]

    @property
    def batches(self) -> list[tuple[str, bytes, int]]:
        found = (each for response in self.responses for each in response.batches)
        return [(f"{each.namespace}/{each.key}", each.payload, each.offset) for each in found]

    @property
    def reached(self) -> int:
        return self.responses[-1].head.next_offset


def reading(caller: Caller, end: int, selector: str = "*/*", *, start: int = 0, **fields: Any) -> Stream:
    request = pb.ReadRequest(start_offset=start, end_offset=end, selector=selector, **fields)
    return caller.responses(f"{READER}/Read", request)


class Raw:
    """In place of a message: the bytes that came."""

    @staticmethod
    def FromString(message: bytes) -> bytes:  # noqa: N802 (as protobuf names it)
        return message


async def rest(stream: Stream) -> Read:
    messages: list[bytes] = []
    kind: Any = Raw
    try:
        while (message := await stream.read(kind)) is not None:
            messages.append(message)
    except Refused as refused:
        return Read(messages, refused)
    return Read(messages, None)


async def read(caller: Caller, end: int, selector: str = "*/*", **fields: Any) -> Read:
    return await rest(reading(caller, end, selector, **fields))


async def queues(caller: Caller, **fields: Any) -> Sequence[pb.QueueRange]:
    return (await caller.ask(f"{READER}/GetQueues", pb.GetQueuesRequest(**fields), pb.GetQueuesResponse)).queues


async def end_within(caller: Caller, start: int, end: int, **fields: Any) -> int:
    request = pb.EndWithinRequest(start_offset=start, end_offset=end, **fields)
    return (await caller.ask(f"{READER}/EndWithin", request, pb.EndWithinResponse)).end_offset


@asynccontextmanager
async def one_queue(data: Path | None, **options: Any) -> AsyncGenerator[tuple[Silo, Caller]]:
    async with opened(data, provider=ONE_QUEUE, **options) as silo, connecting(silo.grpc_address or "") as caller:
        yield silo, caller


def adapter_of(silo: Silo) -> QueueAdapter:
    return silo.providers["default"].adapter


async def store(silo: Silo, *batches: EventBatch) -> None:
    await adapter_of(silo).enqueue([(0, each) for each in batches])


def sized(key: str, nbytes: int) -> EventBatch:
    return EventBatch.of(StreamId("n", key), [bytes(nbytes)])


# What is there


async def test_queues_report_their_bounds_and_the_offset_of_a_time(tmp_path: Path):
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        empty = pb.QueueRange(first_offset=0, next_offset=0, events=0, bytes=0)
        assert await queues(caller) == [empty, empty]
        receipts = await caller.publish(batch("n/a", b"1", b"2"), batch("n/a", b"3"))
        queue = receipts[0].queue
        found = (await queues(caller))[queue]
        assert (found.first_offset, found.next_offset, found.events) == (0, 2, 3)
        assert found.bytes == (await adapter_of(silo).statistics(queue)).bytes
        assert not found.HasField("time_offset")
        assert [each.time_offset for each in await queues(caller, time_us=1)] == [0, 0]
        assert (await queues(caller, time_us=250_000_000_000_000_000))[queue].time_offset == 2


async def test_a_range_is_read_as_it_was_published(tmp_path: Path):
    async with one_queue(tmp_path) as (_, caller):
        await caller.publish(*(batch(f"n/{number % 3}", b"%d" % number) for number in range(10)))
        everything = await read(caller, 10)
        assert everything.batches == [(f"n/{number % 3}", b"%d" % number, number) for number in range(10)]
        assert (everything.reached, everything.refused) == (10, None)
        assert (await read(caller, 7, start=4)).batches == everything.batches[4:7]
        assert (await read(caller, 7, start=7)).batches == []


async def test_only_streams_that_are_selected_are_sent(tmp_path: Path):
    async with one_queue(tmp_path) as (_, caller):
        await caller.publish(*(batch(f"{space}/{key}", b"x") for space in ("a", "hidden") for key in ("1", "2")))
        found = await read(caller, 4, "a/*")
        assert [stream for stream, *_ in found.batches] == ["a/1", "a/2"]
        assert b"hidden" not in b"".join(found.messages)
        assert found.reached == 4
        assert [stream for stream, *_ in (await read(caller, 4, "*/2")).batches] == ["a/2", "hidden/2"]


async def test_the_columns_say_where_each_batch_is(tmp_path: Path):
    async with one_queue(tmp_path) as (silo, caller):
        sizes = [1, 120, 130, 20_000, 3, 200_000]
        await store(silo, *(sized(f"k{size}", size) for size in sizes))
        stored = [each async for each in everything(adapter_of(silo))]
        (response,), (message,) = (found := await read(caller, len(sizes))).responses, found.messages
        head, (delivered, rest_of_it) = response.head, split(message)
        columns = zip(head.starts, head.sizes, head.prefixes, head.counts, head.offsets, strict=True)
        for original, (start, size, prefix, count, offset) in zip(stored, columns, strict=True):
            assert message[len(rest_of_it) + start :][:size] == original.encoded
            assert original.encoded[:prefix] == original.stream.prefix
            assert (count, offset) == (original.count, original.offset)
        assert [each.batch for each in delivered] == stored


async def everything(adapter: QueueAdapter) -> AsyncGenerator[EventBatch]:
    end = (await adapter.bounds(0)).next
    receiver = await adapter.open_receiver(0, 0)
    at = 0
    while at < end:
        received = await receiver.receive(1 << 30, 1 << 30)
        for each in received.batches:
            yield each
        at = received.next_offset
    await receiver.aclose()


async def test_a_response_has_about_a_mebibyte_or_one_batch(tmp_path: Path):
    async with one_queue(tmp_path) as (silo, caller):
        large = EventBatch.of(StreamId("n", "large"), [bytes(1 << 20)] * 2)
        await store(silo, *(sized("s", 1000) for _ in range(1500)), large, *(sized("s", 400_000) for _ in range(5)))
        found = await read(caller, 1506)
        assert [offset for *_, offset in found.batches] == list(range(1506))
        for message, response in zip(found.messages, found.responses, strict=True):
            assert len(message) < 1.2 * reader.RESPONSE_BYTES or len(response.batches) == 1
        assert len(found.messages) == 6  # two, the large one, 2 + 2 + 1
        assert [each.head.next_offset for each in found.responses][-4:] == [1501, 1503, 1505, 1506]


async def test_filtered_reader_is_told_its_position_from_time_to_time(tmp_path: Path):
    async with one_queue(tmp_path, service_limits=ServiceLimits(silent_bytes=1 << 20)) as (silo, caller):
        await store(silo, *(sized("other", 100_000) for _ in range(50)))
        found = await read(caller, 50, "n/mine")
        assert found.batches == []
        reached = [each.head.next_offset for each in found.responses]
        assert len(reached) > 3
        assert reached == sorted(set(reached))
        assert reached[-1] == 50


async def test_the_reader_is_waited_for(tmp_path: Path):
    async with one_queue(tmp_path) as (silo, caller):
        for _ in range(40):
            await store(silo, *(sized("s", 500_000) for _ in range(2)))
        stream = reading(caller, 80)
        first = await stream.read(pb.ReadResponse)
        assert first is not None
        await caller.publish(batch("n/other", b"goes on"))
        found = await rest(stream)
        assert found.reached == 80
        assert len(first.batches) + len(found.batches) == 80


async def test_calls_that_are_not_read_leave_space_to_other_clients(tmp_path: Path):
    limits = ServiceLimits(unsent_bytes=8 << 20)
    tokens = await make_tokens(tmp_path, deaf=Allowed(["*"], ["*"]), reads=Allowed(["*"], ["*"]))
    async with (
        opened(tmp_path, provider=ONE_QUEUE, auth="tokens", service_limits=limits) as silo,
        AsyncExitStack() as stack,
    ):
        await store(silo, *(sized("s", 1_000_000) for _ in range(9)))
        address = silo.grpc_address or ""
        caller, *deaf = [
            await stack.enter_async_context(connecting(address, tokens["reads" if number == 0 else "deaf"]))
            for number in range(21)
        ]
        streams = [reading(each, 9) for each in deaf]

        async def others_wait() -> bool:
            return len(silo.read_budget.waiting) >= 16

        await eventually(others_wait)
        assert 2 << 20 < silo.read_budget.held <= 4 << 20
        assert (await read(caller, 9)).reached == 9
        *others, waiting, last = streams
        for stream in others:
            stream.cancel()
        for stream in (waiting, last):
            assert (await rest(stream)).reached == 9

        async def all_freed() -> bool:
            return not silo.read_budget.held and not silo.read_budget.clients

        await eventually(all_freed)


async def test_reach_counts_events_and_bytes(tmp_path: Path):
    async with one_queue(tmp_path) as (_, caller):
        await caller.publish(*(batch("n/a", *[b"x"] * number) for number in (1, 2, 3, 4)))
        assert await end_within(caller, 0, 4) == 4
        assert await end_within(caller, 0, 9) == 4
        assert await end_within(caller, 0, 4, max_events=3) == 2
        assert await end_within(caller, 0, 4, max_events=0) == 1
        assert await end_within(caller, 2, 4, max_events=6) == 3
        assert await end_within(caller, 0, 4, max_bytes=1) == 1
        assert await end_within(caller, 4, 4, max_events=1) == 4


# What is refused


async def test_removed_offsets_are_refused_with_their_own_code(tmp_path: Path):
    provider = {"queues": 1, "options": {"retain_bytes": 1}}
    async with opened(tmp_path, provider=provider) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.publish(batch("n/a", b"0"))
        await caller.publish(batch("n/a", b"1"))
        await adapter_of(silo).apply_retention({})
        (left,) = await queues(caller)
        assert left.first_offset > 0
        found = await read(caller, left.next_offset)
        assert found.refused is not None
        assert (found.refused.status, found.refused.code) == ("OUT_OF_RANGE", "offsets_gone")
        assert "queue 0: offsets 0 to" in found.refused.details
        with pytest.raises(Refused, match=r"OUT_OF_RANGE \(offsets_gone\)"):
            await end_within(caller, 0, 2, max_events=1)


async def test_before_a_damaged_block_everything_is_sent(tmp_path: Path):
    async with one_queue(tmp_path) as (silo, caller):
        await caller.publish(batch("n/a", b"0"))
        await caller.publish(batch("n/a", b"1"))
        await caller.publish(batch("n/a", b"2"))
        await asyncio.to_thread(damage, silo, 1)
        found = await read(caller, 3)
        assert [offset for *_, offset in found.batches] == [0]
        assert found.reached == 1
        assert found.refused is not None
        assert (found.refused.status, found.refused.code) == ("DATA_LOSS", "corrupt_record")
        assert "queue 0, offset 1" in found.refused.details
        assert (await read(caller, 3, start=2)).reached == 3


def damage(silo: Silo, offset: int) -> None:
    adapter: Any = adapter_of(silo)
    with adapter._environment.writing() as changes:
        record = bytearray(changes.record(0, offset))
        record[-1] ^= 1
        changes.delete(0, offset)
        changes._txn.put(offset.to_bytes(8, "big"), bytes(record), db=changes._databases.blocks[0])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"start": 2, "end": 1}, "start_offset is above the end"),
        ({"end": 2}, "queue 0 ends at offset 1: it cannot be read to 2"),
        ({"end": 1, "queue": 1}, "there is no queue 1"),
        ({"end": 1, "selector": "n"}, "'n' selects no stream"),
    ],
)
async def test_a_bad_range_is_refused(tmp_path: Path, fields: Any, text: str):
    async with one_queue(tmp_path) as (_, caller):
        await caller.publish(batch("n/a", b"0"))
        found = await read(caller, **fields)
        assert found.refused is not None
        assert found.refused.code == "invalid_argument"
        assert text in found.refused.details


async def test_an_adapter_that_cannot_go_back_is_refused():
    async with opened(None, provider={"adapter": "memory"}) as silo, connecting(silo.grpc_address or "") as caller:
        told = r"FAILED_PRECONDITION \(not_supported\): provider 'default' cannot be read by ranges of offsets"
        for call in (queues(caller), end_within(caller, 0, 0)):
            with pytest.raises(Refused, match=told):
                await call
        refused = (await read(caller, 0)).refused
        assert refused is not None
        assert refused.code == "not_supported"


async def test_an_adapter_that_makes_its_data_can_be_read(tmp_path: Path):
    provider = {"adapter": "generator", "queues": 1, "options": {"events": 5000, "rate": 1e12}}
    async with opened(tmp_path, provider=provider) as silo, connecting(silo.grpc_address or "") as caller:
        assert [each.next_offset for each in await queues(caller)] == [5]
        assert await end_within(caller, 0, 5, max_events=3500) == 3
        found = await read(caller, 5)
        assert found.refused is None
        assert [each.head.counts for each in found.responses] == [[1000] * 5]


# Rights


async def test_only_streams_that_the_caller_may_subscribe_to_are_read_and_counted(tmp_path: Path):
    tokens = await make_tokens(
        tmp_path, all=Allowed(["*"], ["*"]), shop=Allowed(subscribe=["shop"]), writer=Allowed(["*"])
    )
    async with opened(tmp_path, provider=ONE_QUEUE, auth="tokens") as silo:
        address = silo.grpc_address or ""
        async with connecting(address, tokens["all"]) as caller:
            await caller.publish(*(batch(f"{space}/a", b"x", b"y") for space in ("shop", "bank", "shop", "shop")))
            assert [each.events for each in await queues(caller)] == [8]
            assert await end_within(caller, 0, 4, max_events=4) == 2
        async with connecting(address, tokens["shop"]) as caller:
            (there,) = await queues(caller)
            assert (there.next_offset, there.HasField("events"), there.HasField("bytes")) == (4, False, False)
            assert await end_within(caller, 0, 4, max_events=4) == 3
            assert [offset for *_, offset in (await read(caller, 4, "shop/*")).batches] == [0, 2, 3]
            for selector in ("*/*", "bank/a", "shop*/a"):
                await forbidden(caller, selector)
        async with connecting(address, tokens["writer"]) as caller:
            await forbidden(caller, "shop/*")
            with pytest.raises(Refused, match="PERMISSION_DENIED"):
                await queues(caller)
            with pytest.raises(Refused, match="PERMISSION_DENIED"):
                await end_within(caller, 0, 1)
        async with connecting(address) as caller:
            refused = (await read(caller, 4)).refused
            assert refused is not None
            assert refused.status == "UNAUTHENTICATED"


async def forbidden(caller: Caller, selector: str) -> None:
    found = await read(caller, 4, selector)
    assert found.refused is not None
    assert found.refused.status == "PERMISSION_DENIED"
    assert found.messages == []


async def test_counting_for_a_caller_that_may_read_few_streams_ends_at_a_limit(tmp_path: Path):
    tokens = await make_tokens(tmp_path, mine=Allowed(["*"], ["mine"]))
    limits = ServiceLimits(end_within_bytes=3 << 20)
    async with opened(tmp_path, provider=ONE_QUEUE, auth="tokens", service_limits=limits) as silo:
        await store(silo, *(sized("other", 500_000) for _ in range(20)))
        async with connecting(silo.grpc_address or "", tokens["mine"]) as caller:
            assert await end_within(caller, 0, 20, max_events=1) == 0
            await caller.publish(batch("mine/a", b"x"))
            steps = [0]
            while steps[-1] < 20:
                steps.append(await end_within(caller, steps[-1], 20, max_events=1))
            assert len(steps) > 3
            assert steps == sorted(set(steps))


# Silos that come and go


@pytest.mark.long
async def test_a_silo_that_stops_ends_the_call_and_another_goes_on(tmp_path: Path):
    config = SiloConfig(
        data=str(tmp_path), drain_s=5.0, grpc=GrpcConfig(port=0), providers={"default": ProviderConfig(queues=1)}
    )
    async with clustered(config, 2) as silos:
        async with connecting(silos[0].grpc_address or "") as caller:
            await store(silos[0], *(sized("s", 500_000) for _ in range(100)))
            stream = reading(caller, 100)
            first = await stream.read(pb.ReadResponse)
            assert first is not None
            stopping = asyncio.create_task(silos.stop(0))
            await eventually(partial(stops, caller))
            found = await rest(stream)
            await stopping
            assert found.refused is not None
            assert (found.refused.status, found.refused.code) == ("UNAVAILABLE", "unavailable")
        async with connecting(silos[1].grpc_address or "") as caller:
            await silos.shared([1])
            begun = Read([first.SerializeToString(), *found.messages], None)
            more = await read(caller, 100, start=begun.reached)
            assert begun.reached < 100
            assert [offset for *_, offset in [*begun.batches, *more.batches]] == list(range(100))


async def stops(caller: Caller) -> bool:
    try:
        await queues(caller)
    except Refused as refused:
        return refused.status == "UNAVAILABLE"
    return False


async def test_every_silo_serves_the_queues_of_others(tmp_path: Path):
    config = SiloConfig(data=str(tmp_path), grpc=GrpcConfig(port=0), providers={"default": ProviderConfig(queues=4)})
    async with clustered(config, 2) as silos:
        async with connecting(silos[0].grpc_address or "") as caller:
            await caller.publish(*(batch(f"n/{number}", b"x") for number in range(100)))
        for silo in silos:
            async with connecting(silo.grpc_address or "") as caller:
                ends = [each.next_offset for each in await queues(caller)]
                found = [await read(caller, end, queue=queue) for queue, end in enumerate(ends)]
                assert sum(len(each.batches) for each in found) == 100
