"""Waking receivers: only those of queues that have grown, in this process and in others, without polling."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import Popen

import pytest

from headrace import EventBatch, StreamId
from headrace.adapters import Received
from headrace.adapters.log import LogAdapter, LogOptions
from headrace.adapters.log.blocks import ReadBudget, StreamTable
from headrace.adapters.log.doorbell import Doorbell, DoorbellRinger
from headrace.adapters.log.environment import acquire, release
from headrace.adapters.log.limits import LogLimits
from headrace.adapters.log.receiver import LogReceiver, QueueReader

OpenLog = Callable[..., Awaitable[LogAdapter]]
BATCH = EventBatch.of(StreamId("tests", "doorbell"), [b"x"])


NO_POLL = LogLimits(safety_poll_s=3600.0)


@pytest.fixture
def open_log(open_log: OpenLog) -> OpenLog:
    """Opens handles that do not poll."""
    return partial(open_log, limits=NO_POLL)


def in_thread(work: Callable[..., object], *arguments: object) -> None:
    """Run it to the end while the loop stands still."""
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    thread.join()


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.fixture
async def bell(tmp_path: Path) -> AsyncIterator[Doorbell]:
    found = Doorbell(tmp_path, NO_POLL)
    yield found
    await found.aclose()


async def test_handles_of_one_process_wake_each_other(open_log: OpenLog):
    one, two = await open_log(), await open_log()
    receiver = await one.open_receiver(0, 0)
    waiting = asyncio.create_task(receiver.receive(1, 1))
    await two.enqueue([(0, BATCH)])
    assert (await waiting).next_offset == 1


async def test_a_handle_wakes_its_own_receivers(open_log: OpenLog):
    adapter = await open_log()
    receiver = await adapter.open_receiver(0, 0)
    waiting = asyncio.create_task(receiver.receive(1, 1))
    await adapter.enqueue([(0, BATCH)])
    assert (await waiting).next_offset == 1


async def test_a_waiting_receiver_looks_again_only_when_it_is_rung(tmp_path: Path):
    environment = await asyncio.to_thread(acquire, tmp_path / "log", LogOptions(), "tests", 1)
    looks: asyncio.Queue[int] = asyncio.Queue()
    grown = asyncio.Event()

    class Reader(QueueReader):
        def read_fresh(self, position: int, budget: ReadBudget) -> Received | None:
            looks.put_nowait(position)
            return super().read_fresh(position, budget)

    async def read(_: Callable[[], Received]) -> Received:
        raise AssertionError

    reader = Reader(environment, 0, StreamTable())
    receiver = LogReceiver(reader, 0, grown=grown, run=read, acknowledge=print, on_close=print)
    waiting = asyncio.create_task(receiver.receive(1, 1))
    for _ in range(3):
        await looks.get()
        for _ in range(20):
            await asyncio.sleep(0)
        assert looks.empty()
        grown.set()
    waiting.cancel()
    await asyncio.wait([waiting])
    await asyncio.to_thread(release, environment)


async def test_a_handle_that_comes_later_is_rung_too(bell: Doorbell, tmp_path: Path):
    ringer = DoorbellRinger(tmp_path, "somebody else")
    await asyncio.to_thread(os.utime, tmp_path, (0, 0))
    await asyncio.to_thread(ringer.ring, {0})
    grown = await bell.listen(0)
    grown.clear()
    await asyncio.to_thread(ringer.ring, {0})
    await grown.wait()
    ringer.close()


async def test_only_receivers_of_grown_queues_wake(bell: Doorbell, tmp_path: Path):
    zero, five = await bell.listen(0), await bell.listen(5)
    zero.clear()
    five.clear()
    ringer = DoorbellRinger(tmp_path, "somebody else")
    await asyncio.to_thread(ringer.ring, {5, 300})
    await five.wait()
    assert not zero.is_set()
    ringer.close()


async def test_a_handle_does_not_ring_its_own_fifo(bell: Doorbell, tmp_path: Path):
    await bell.listen(0)
    ringer = DoorbellRinger(tmp_path, bell.name)
    in_thread(ringer.ring, {0})
    fifo = os.open(tmp_path / bell.name, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        os.read(fifo, 1)
    os.close(fifo)
    ringer.close()


async def test_very_many_queues_are_rung_all_together(bell: Doorbell, tmp_path: Path):
    grown = await bell.listen(7)
    grown.clear()
    ringer = DoorbellRinger(tmp_path, "somebody else")
    await asyncio.to_thread(ringer.ring, range(1000, 4000))
    await grown.wait()
    ringer.close()


async def test_a_full_fifo_wakes_everybody(bell: Doorbell, tmp_path: Path):
    grown = await bell.listen(7)
    grown.clear()
    fifo = os.open(tmp_path / bell.name, os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(fifo, bytes(4096))
    os.close(fifo)
    ringer = DoorbellRinger(tmp_path, "somebody else")
    in_thread(ringer.ring, {7})
    await grown.wait()
    ringer.close()


async def test_a_dead_handles_fifo_is_removed(open_log: OpenLog, tmp_path: Path):
    adapter = await open_log()
    os.mkfifo(tmp_path / "wake" / "1-dead")
    (tmp_path / "wake" / "2-foreign").write_text("no fifo")
    await adapter.enqueue([(0, BATCH)])
    assert names(tmp_path / "wake") == ["2-foreign"]


async def test_a_handle_that_dies_while_others_ring_it_is_removed(tmp_path: Path):
    name = "3-dying"
    os.mkfifo(tmp_path / name)
    fifo = os.open(tmp_path / name, os.O_RDWR | os.O_NONBLOCK)
    ringer = DoorbellRinger(tmp_path, "somebody else")
    await asyncio.to_thread(ringer.ring, {0})
    assert os.read(fifo, 100) == b"\0\0"
    os.close(fifo)
    await asyncio.to_thread(ringer.ring, {0})
    assert names(tmp_path) == []
    await asyncio.to_thread(ringer.ring, {0})


async def test_a_handle_removes_its_fifo(open_log: OpenLog, tmp_path: Path):
    adapter = await open_log()
    assert names(tmp_path / "wake") == []
    await adapter.open_receiver(0, 0)
    assert len(names(tmp_path / "wake")) == 1
    await adapter.aclose()
    assert names(tmp_path / "wake") == []


async def test_a_lost_ring_is_made_good_by_the_safety_poll(tmp_path: Path):
    bell = Doorbell(tmp_path, LogLimits(safety_poll_s=0.001))
    grown = await bell.listen(0)
    for _ in range(3):
        grown.clear()
        await grown.wait()
    await bell.aclose()


WAITING = """
import asyncio, sys
from contextlib import suppress
from pathlib import Path
from headrace.adapters import AdapterContext
from headrace.adapters.log import open_adapter
from headrace.adapters.log.limits import LogLimits

async def main():
    context = AdapterContext(provider="tests", queues=2, directory=Path(sys.argv[1]))
    adapter = await open_adapter(context, {}, LogLimits(safety_poll_s=3600.0))
    receiver = await adapter.open_receiver(1, 0)
    print("ready", flush=True)
    position = 0
    while position < 20:
        position = (await receiver.receive(1, 1)).next_offset
        print(position, flush=True)
    await adapter.aclose()

asyncio.run(main())
"""


async def test_a_receiver_in_another_process_is_woken_by_each_commit(
    open_log: OpenLog, run_script: Callable[..., Popen[str]]
):
    adapter = await open_log()
    reader = run_script(WAITING)
    assert reader.stdout is not None
    assert await asyncio.to_thread(reader.stdout.readline) == "ready\n"
    for number in range(20):
        await adapter.enqueue([(1, BATCH)])
        assert await asyncio.to_thread(reader.stdout.readline) == f"{number + 1}\n"
    assert await asyncio.to_thread(reader.wait) == 0
