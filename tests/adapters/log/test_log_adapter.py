"""The log adapter as its users see it: published batches are read, from any start."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from headrace import Closed, EventBatch, InvalidArgument, PayloadTooLarge, SequenceToken, StreamId
from headrace.adapters import Bounds, QueueReceiver, Receipt, Received
from headrace.adapters.log import MAX_BATCH_BYTES, LogAdapter
from headrace.adapters.log.blocks import ReadBudget
from headrace.adapters.log.limits import LOG_LIMITS, LogLimits
from headrace.adapters.log.receiver import QueueReader

OpenLog = Callable[..., Awaitable[LogAdapter]]
Read = Callable[[QueueReader, int, ReadBudget], Received]
STREAM = StreamId("tests", "log")


def batch(*payloads: str, key: str = "log") -> EventBatch:
    return EventBatch.of(StreamId("tests", key), [payload.encode() for payload in payloads])


async def publish(adapter: LogAdapter, payloads: str, queue: int = 0) -> None:
    """One batch of one event per letter, each committed on its own."""
    for letter in payloads:
        await adapter.enqueue([(queue, batch(letter))])


async def letters(receiver: QueueReceiver, max_events: int = 1000, max_bytes: int = 1 << 20) -> str:
    """What one receive brings."""
    received = await receiver.receive(max_events, max_bytes)
    return b"".join(payload for part in received.batches for payload in part.payloads()).decode()


async def test_batches_come_back_in_order_with_their_offsets(open_log: OpenLog):
    adapter = await open_log()
    receipts = await adapter.enqueue([(0, batch("a", "b")), (1, batch("c", key="other")), (0, batch("d"))])
    assert receipts == [Receipt(SequenceToken(0)), Receipt(SequenceToken(0)), Receipt(SequenceToken(1))]
    received = await (await adapter.open_receiver(0, 0)).receive(1000, 1000)
    assert [(b.stream, b.payloads(), b.offset, b.count) for b in received.batches] == [
        (STREAM, [b"a", b"b"], 0, 2),
        (STREAM, [b"d"], 1, 1),
    ]
    assert received.next_offset == 2
    other = await (await adapter.open_receiver(1, 0)).receive(1000, 1000)
    assert [b.stream for b in other.batches] == [StreamId("tests", "other")]


async def test_calls_are_stored_in_order_without_awaiting_in_between(open_log: OpenLog):
    adapter = await open_log()
    answers = [adapter.enqueue([(0, batch(str(number)))]) for number in range(500)]
    receipts = await asyncio.gather(*answers)
    assert [receipt.token for [receipt] in receipts] == [SequenceToken(offset) for offset in range(500)]
    received = await (await adapter.open_receiver(0, 0)).receive(1000, 1 << 20)
    assert [b.payloads() for b in received.batches] == [[str(number).encode()] for number in range(500)]


async def test_reading_goes_on_where_a_limit_stopped_it(open_log: OpenLog):
    adapter = await open_log()
    await publish(adapter, "ab")
    await adapter.enqueue([(0, batch(letter)) for letter in "cdef"])
    receiver = await adapter.open_receiver(0, 0)
    assert [await letters(receiver, max_events=1) for _ in range(4)] == ["a", "b", "c", "d"]
    assert await letters(receiver, max_bytes=1) == "e"
    assert await letters(receiver) == "f"


async def test_a_limit_below_one_still_brings_a_batch(open_log: OpenLog):
    adapter = await open_log()
    await publish(adapter, "ab")
    assert await letters(await adapter.open_receiver(0, 0), max_events=0, max_bytes=0) == "a"


async def test_a_batch_above_the_limit_is_returned_alone(open_log: OpenLog):
    adapter = await open_log()
    await adapter.enqueue([(0, batch("x" * 1000)), (0, batch("y"))])
    receiver = await adapter.open_receiver(0, 0)
    assert await letters(receiver, max_bytes=10) == "x" * 1000
    assert await letters(receiver, max_bytes=10) == "y"


async def test_every_offset_is_a_place_to_start(open_log: OpenLog):
    adapter = await open_log()
    await publish(adapter, "ab")
    await adapter.enqueue([(0, batch(letter)) for letter in "cde"])
    assert [await letters(await adapter.open_receiver(0, start)) for start in range(5)] == [
        "abcde",
        "bcde",
        "cde",
        "de",
        "e",
    ]


async def test_a_start_beyond_the_end_is_refused(open_log: OpenLog):
    adapter = await open_log()
    await publish(adapter, "a")
    for start in (2, -1):
        with pytest.raises(InvalidArgument, match="ends at offset 1"):
            await adapter.open_receiver(0, start)


async def test_receive_waits_for_the_next_commit(open_log: OpenLog):
    adapter = await open_log()
    receiver = await adapter.open_receiver(0, 0)
    waiting = asyncio.create_task(letters(receiver))
    await publish(adapter, "other queue", queue=1)
    assert not waiting.done()
    await publish(adapter, "a")
    assert await waiting == "a"


async def test_a_cancelled_receive_loses_nothing(open_log: OpenLog):
    adapter = await open_log(limits=LogLimits(fresh_bytes=0))  # a thread reads
    await publish(adapter, "abc")
    receiver = await adapter.open_receiver(0, 0)
    turns, cancelled = 0, True
    while cancelled:
        task = asyncio.create_task(letters(receiver, max_events=1))
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled, turns = task.cancel(), turns + 1
        if cancelled:
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert await task == "a"
    assert turns > 2
    assert await letters(receiver) == "bc"


@pytest.mark.parametrize("small", ["", "ab"])
async def test_a_large_block_is_read_in_a_thread_also_behind_small_ones(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch, small: str
):
    threaded: list[int] = []

    def read(reader: QueueReader, position: int, want: ReadBudget, original: Read = QueueReader.read) -> Received:
        threaded.append(position)
        return original(reader, position, want)

    monkeypatch.setattr(QueueReader, "read", read)
    adapter = await open_log()
    large = "x" * LOG_LIMITS.fresh_bytes  # in a block, metadata comes on top
    await publish(adapter, small)
    await adapter.enqueue([(0, batch(large))])
    receiver = await adapter.open_receiver(0, 0)
    for expected in filter(None, [small, large]):
        assert await letters(receiver) == expected
    assert threaded == [len(small)]


async def test_published_events_are_stored_after_a_restart(open_log: OpenLog):
    adapter = await open_log()
    await publish(adapter, "ab")
    await adapter.aclose()
    adapter = await open_log()
    assert await adapter.bounds(0) == Bounds(0, 2)
    assert await letters(await adapter.open_receiver(0, 0)) == "ab"
    [receipt] = await adapter.enqueue([(0, batch("c"))])
    assert receipt.token == SequenceToken(2)


async def test_a_receiver_without_a_start_begins_after_the_acknowledged_batches(open_log: OpenLog):
    adapter = await open_log()
    await publish(adapter, "abcd")
    receiver = await adapter.open_receiver(0)
    assert await letters(receiver) == "abcd"
    await receiver.acknowledge(3)
    await receiver.acknowledge(1)
    assert await letters(await adapter.open_receiver(0)) == "d"
    await adapter.aclose()
    adapter = await open_log()
    assert await letters(await adapter.open_receiver(0)) == "d"
    assert await letters(await adapter.open_receiver(0, 0)) == "abcd"


async def test_acknowledging_beyond_the_end_does_not_skip_later_batches(open_log: OpenLog):
    adapter = await open_log()
    await publish(adapter, "a")
    await (await adapter.open_receiver(0)).acknowledge(10)
    await adapter.aclose()
    adapter = await open_log()
    await publish(adapter, "b")
    assert await letters(await adapter.open_receiver(0)) == "b"


async def test_handles_of_one_process_share_acknowledgements(open_log: OpenLog):
    one, two = await open_log(), await open_log()
    await publish(one, "abcd")
    await (await one.open_receiver(0)).acknowledge(2)
    assert await letters(await two.open_receiver(0)) == "cd"


async def test_handles_of_one_process_share_a_log(open_log: OpenLog):
    one, two = await open_log(), await open_log()
    receiver = await two.open_receiver(0, 0)
    await asyncio.gather(*(adapter.enqueue([(0, batch("x"))]) for adapter in (one, two) * 20))
    await one.aclose()
    await publish(two, "y")
    read = ""
    while len(read) < 41:
        read += await letters(receiver)
    assert read == "x" * 40 + "y"


async def test_closing_stores_the_batches_of_earlier_calls(open_log: OpenLog):
    adapter = await open_log()
    answers = [asyncio.ensure_future(adapter.enqueue([(0, batch("x"))])) for _ in range(100)]
    await adapter.aclose()
    assert all(answer.done() for answer in answers)
    assert (await (await open_log()).bounds(0)).next == 100


async def test_a_closed_adapter_says_so(open_log: OpenLog):
    adapter = await open_log()
    receiver = await adapter.open_receiver(0, 0)
    waiting = asyncio.create_task(receiver.receive(1, 1))
    await asyncio.sleep(0)
    await adapter.aclose()
    await adapter.aclose()
    with pytest.raises(Closed):
        await waiting
    for use in (
        lambda: adapter.enqueue([(0, batch("x"))]),
        lambda: adapter.open_receiver(0),
        lambda: adapter.bounds(0),
        lambda: receiver.receive(1, 1),
        lambda: receiver.acknowledge(0),
    ):
        with pytest.raises(Closed):
            await use()


async def test_a_closed_receiver_says_so_and_the_others_go_on(open_log: OpenLog):
    adapter = await open_log()
    receiver, other = await adapter.open_receiver(0, 0), await adapter.open_receiver(0, 0)
    waiting = asyncio.create_task(receiver.receive(1, 1))
    await asyncio.sleep(0)
    await receiver.aclose()
    await receiver.aclose()
    with pytest.raises(Closed):
        await waiting
    await publish(adapter, "a")
    assert await letters(other) == "a"


async def test_statistics_count_retained_batches(open_log: OpenLog):
    adapter = await open_log()
    assert (await adapter.statistics(0))[:2] == (Bounds(0, 0), 0)
    await adapter.enqueue([(0, batch("a", "b")), (0, batch("c"))])
    found = await adapter.statistics(0)
    assert found[:2] == (Bounds(0, 2), 3)
    assert found.bytes is not None
    assert found.bytes > batch("a", "b").nbytes + batch("c").nbytes


async def test_a_batch_above_the_limit_is_refused_before_anything_is_stored(open_log: OpenLog):
    adapter = await open_log()
    giant = EventBatch(STREAM, bytes(MAX_BATCH_BYTES + 1), 1)
    with pytest.raises(PayloadTooLarge, match="16,777,217 bytes"):
        await adapter.enqueue([(0, batch("a")), (0, giant)])
    assert await adapter.bounds(0) == Bounds(0, 0)


async def test_a_batch_at_the_limit_is_stored(open_log: OpenLog):
    adapter = await open_log()
    giant = EventBatch.of(STREAM, [bytes(1 << 20)] * 15)
    await adapter.enqueue([(0, giant)])
    [found] = (await (await adapter.open_receiver(0, 0)).receive(1, 1)).batches
    assert found.encoded == giant.encoded


async def test_bytes_that_are_no_batch_are_refused_before_they_block_the_queue(open_log: OpenLog):
    adapter = await open_log()
    with pytest.raises(InvalidArgument):
        await adapter.enqueue([(0, EventBatch(STREAM, b"garbage", 1))])
    with pytest.raises(InvalidArgument, match="another stream"):
        await adapter.enqueue([(0, EventBatch(STREAM, batch("x", key="b").encoded, 1))])
    assert await adapter.bounds(0) == Bounds(0, 0)


@pytest.mark.parametrize("queue", [2, -1])
async def test_a_queue_that_does_not_exist_is_refused(open_log: OpenLog, queue: int):
    adapter = await open_log(queues=2)
    for use in (
        lambda: adapter.enqueue([(queue, batch("a"))]),
        lambda: adapter.open_receiver(queue, 0),
        lambda: adapter.bounds(queue),
        lambda: adapter.offset_at(queue, 0),
    ):
        with pytest.raises(InvalidArgument, match="has queues 0 to 1"):
            await use()


async def test_positions_are_found_by_time(open_log: OpenLog):
    adapter = await open_log()
    marks = [time.time_ns() // 1000]
    for number in range(20):
        await adapter.enqueue([(0, batch("x"))] * (number % 3 + 1))
        marks.append(time.time_ns() // 1000 + 1)
    found = [await adapter.offset_at(0, mark) for mark in marks]
    firsts = [sum(n % 3 + 1 for n in range(number)) for number in range(21)]
    assert found == firsts
    assert await adapter.offset_at(0, 0) == 0
    assert await adapter.offset_at(1, 0) == 0


async def test_events_published_relaxed_are_stored_after_a_restart(open_log: OpenLog):
    adapter = await open_log(durability="relaxed")
    await publish(adapter, "ab")
    await adapter.aclose()
    adapter = await open_log(durability="relaxed")
    assert await letters(await adapter.open_receiver(0, 0)) == "ab"


async def test_a_call_without_batches_is_no_error(open_log: OpenLog):
    adapter = await open_log()
    assert list(await adapter.enqueue([])) == []


async def test_many_queues(open_log: OpenLog):
    adapter = await open_log(queues=300)
    await adapter.enqueue([(queue, batch(str(queue))) for queue in range(300)])
    assert [await letters(await adapter.open_receiver(queue, 0)) for queue in (0, 150, 299)] == ["0", "150", "299"]
