"""Batches that this process commits are offered to its receivers, in order and once, whatever other writers do."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from subprocess import Popen

import pytest

from headrace import Closed, EventBatch, StreamId
from headrace.adapters import Receipt, Received
from headrace.adapters.log import LogAdapter
from headrace.adapters.log.doorbell import Doorbell
from headrace.adapters.log.receiver import LogReceiver

OpenLog = Callable[..., Awaitable[LogAdapter]]
RunScript = Callable[..., Popen[str]]
ANY = 1 << 30

PUBLISHER = """
import asyncio, sys
from pathlib import Path
from headrace.adapters import AdapterContext, open_adapter
from headrace import EventBatch, StreamId

async def main():
    context = AdapterContext(provider="tests", queues=2, directory=Path(sys.argv[1]))
    adapter = await open_adapter("log", context, {})
    for number in range(int(sys.argv[2])):
        await adapter.enqueue([(0, EventBatch.of(StreamId("tests", "other"), [b"%d" % number]))])
    await adapter.aclose()

asyncio.run(main())
"""


def batch(text: str, key: str = "own") -> EventBatch:
    return EventBatch.of(StreamId("tests", key), [text.encode()])


def texts(batches: Sequence[EventBatch]) -> list[str]:
    return [payload.decode() for batch in batches for payload in batch.payloads()]


class Reader:
    """Reads a queue in a task, by `receive` and by the offers that it accepts."""

    def __init__(self, receiver: LogReceiver, accepts: Callable[[], bool] = lambda: True) -> None:
        self.receiver = receiver
        self.found: list[EventBatch] = []
        self.offered: list[Sequence[EventBatch]] = []
        self.refused = 0
        self._accepts = accepts
        receiver.offer_to(self._accept)
        self._task = asyncio.create_task(self._read())

    def _accept(self, batches: Sequence[EventBatch]) -> bool:
        if not self._accepts():
            self.refused += 1
            return False
        self.offered.append(batches)
        self.found += batches
        return True

    async def _read(self) -> None:
        while True:
            received = await self.receiver.receive(ANY, ANY)
            self.found += received.batches
            assert received.gap is None
            assert [each.offset for each in self.found] == list(range(received.next_offset))

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.found) < count:
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def waiting(adapter: LogAdapter) -> tuple[LogReceiver, asyncio.Task[Received]]:
    """A receiver at the end of queue 0, which waits."""
    receiver = await adapter.open_receiver(0)
    call = asyncio.create_task(receiver.receive(ANY, ANY))
    await asyncio.sleep(0)
    return receiver, call


async def test_committed_batches_are_offered_without_a_read(open_log: OpenLog):
    adapter = await open_log()
    receiver, call = await waiting(adapter)
    offered: list[EventBatch] = []
    receiver.offer_to(lambda batches: offered.extend(batches) or True)
    published = [batch("a"), batch("b")]
    for each in published:
        await adapter.enqueue([(1, batch("elsewhere")), (0, each)])
    assert [each.offset for each in offered] == [0, 1]
    assert all(got.encoded is sent.encoded for got, sent in zip(offered, published, strict=True)), (
        "no payload is copied"
    )
    assert not {id(each) for each in offered} & {id(each) for each in published}
    assert not call.done()
    assert published[0].offset == published[1].offset == 0
    await receiver.aclose()
    assert await call == Received((), 2), "accepted batches count as received"


async def test_an_offer_comes_with_the_answer_to_the_publisher(open_log: OpenLog):
    """In the same turn of the loop: nothing else runs in between."""
    adapter = await open_log()
    receiver, call = await waiting(adapter)
    offered: list[EventBatch] = []
    receiver.offer_to(lambda batches: offered.extend(batches) or True)
    stored = asyncio.ensure_future(adapter.enqueue([(0, batch("a"))]))
    at_the_answer: list[int] = []
    stored.add_done_callback(lambda _: at_the_answer.append(len(offered)))
    await stored
    assert at_the_answer == [1]
    call.cancel()


async def test_a_call_returns_without_batches_if_some_were_accepted_because_its_limits_are_old(open_log: OpenLog):
    own, other = await open_log(), await open_log()
    receiver, call = await waiting(own)
    receiver.offer_to(lambda _: True)
    await own.enqueue([(0, batch("own"))])
    await other.enqueue([(0, batch("other"))])
    assert await call == Received((), 1)
    assert texts((await receiver.receive(1, 1)).batches) == ["other"]


async def test_a_refused_offer_is_received(open_log: OpenLog):
    adapter = await open_log()
    receiver, call = await waiting(adapter)
    receiver.offer_to(lambda _: False)
    await adapter.enqueue([(0, batch("a"))])
    assert texts((await call).batches) == ["a"]


async def test_nothing_is_offered_while_no_call_waits(open_log: OpenLog):
    adapter = await open_log()
    receiver, call = await waiting(adapter)
    offered: list[EventBatch] = []
    receiver.offer_to(lambda batches: offered.extend(batches) or True)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await adapter.enqueue([(0, batch("a"))])
    assert offered == []
    assert texts((await receiver.receive(ANY, ANY)).batches) == ["a"]


async def test_nothing_is_offered_to_a_closed_receiver(open_log: OpenLog):
    adapter = await open_log()
    receiver, call = await waiting(adapter)
    offered: list[EventBatch] = []
    receiver.offer_to(lambda batches: offered.extend(batches) or True)
    await receiver.aclose()
    await adapter.enqueue([(0, batch("a"))])
    assert offered == []
    with pytest.raises(Closed):
        await call


async def test_each_receiver_gets_its_own_batches(open_log: OpenLog):
    adapter = await open_log()
    readers = [Reader(await adapter.open_receiver(0)) for _ in range(2)]
    plain, call = await waiting(adapter)
    await adapter.enqueue([(0, batch("a")), (0, batch("b"))])
    for reader in readers:
        await reader.wait_for(2)
        assert len(reader.offered) == 1
        await reader.stop()
    assert texts((await call).batches) == ["a", "b"]
    assert not {id(each) for each in readers[0].found} & {id(each) for each in readers[1].found}
    await plain.aclose()


async def test_batches_of_another_handle_are_read_in_their_place(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch):
    """The other handle commits before this one, and its ring comes too late."""
    monkeypatch.setattr(Doorbell, "ring", lambda _bell, _queues: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType] (it does nothing)
    own, other = await open_log(), await open_log()
    reader = Reader(await own.open_receiver(0))
    await asyncio.sleep(0)
    await other.enqueue([(0, batch("other"))])
    await own.enqueue([(0, batch("own"))])
    await reader.wait_for(2)
    assert texts(reader.found) == ["other", "own"]
    assert reader.offered == []
    await reader.stop()


@pytest.mark.parametrize("seed", range(10))
async def test_commits_of_two_handles_interleave(open_log: OpenLog, seed: int):
    """Two handles share no state but the directory, as two processes do. Some offers are refused."""
    rng = random.Random(seed)
    handles = [await open_log(), await open_log()]
    readers = [Reader(await each.open_receiver(0), lambda: rng.random() < 0.8) for each in handles for _ in range(2)]

    async def publish(adapter: LogAdapter, key: str) -> None:
        calls: list[asyncio.Future[Sequence[Receipt]]] = []
        for number in range(60):
            made = [batch(f"{number}.{part}", key) for part in range(rng.randint(1, 3))]
            calls += [asyncio.ensure_future(adapter.enqueue([(0, each)])) for each in made]
            if rng.random() < 0.7:
                await asyncio.gather(*calls)
            for _ in range(rng.choice((0, 0, 1, 50))):
                await asyncio.sleep(0)
        await asyncio.gather(*calls)

    await asyncio.gather(publish(handles[0], "a"), publish(handles[1], "b"), publish(handles[0], "c"))
    end = (await handles[0].bounds(0)).next
    for reader in readers:
        await reader.wait_for(end)
        await reader.stop()
    assert [each.offset for each in readers[0].found] == list(range(end))
    assert all(reader.found == readers[0].found for reader in readers)
    assert sum(len(reader.offered) for reader in readers), "some batches were offered"
    assert sum(reader.refused for reader in readers), "some offers were refused"
    assert sum(len(reader.found) - sum(map(len, reader.offered)) for reader in readers), "some batches were read"


async def test_commits_of_two_processes_interleave(open_log: OpenLog, run_script: RunScript):
    adapter = await open_log()
    reader = Reader(await adapter.open_receiver(0))
    other = run_script(PUBLISHER, 150)
    number = 0
    while other.poll() is None or number < 150:
        await adapter.enqueue([(0, batch(str(number)))])
        number += 1
    end = (await adapter.bounds(0)).next
    assert end == number + 150
    await reader.wait_for(end)
    await reader.stop()
    by_key = {key: [each for each in reader.found if each.stream.key == key] for key in ("own", "other")}
    assert texts(by_key["own"]) == [str(each) for each in range(number)]
    assert texts(by_key["other"]) == [str(each) for each in range(150)]
    assert {each.stream.key for offer in reader.offered for each in offer} == {"own"}
