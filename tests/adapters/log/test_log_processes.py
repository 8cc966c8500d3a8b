"""Several processes on one log, and processes that are killed."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from subprocess import Popen

import pytest
from lmdb.verify import verify  # pyright: ignore[reportUnknownVariableType]

from headrace import EventBatch, StreamId
from headrace.adapters.log import LogAdapter

OpenLog = Callable[..., Awaitable[LogAdapter]]
RunScript = Callable[..., Popen[str]]

PUBLISHER = """
import asyncio, sys
from pathlib import Path
from headrace.adapters import AdapterContext, ProducerSequence, open_adapter
from headrace import EventBatch, StreamId

directory, name, durability, limit = sys.argv[1:]
context = AdapterContext(provider="tests", queues=2, directory=Path(directory))

async def main():
    adapter = await open_adapter("log", context, {"durability": durability})
    last = await adapter.last_sequence(name)
    window = []
    for number in range(last + 1, int(limit) + 1):
        batch = EventBatch.of(StreamId("tests", name), [b"%d.%d" % (number, part) for part in range(10)])
        sequence = ProducerSequence(name, number, number - 1)
        window.append(asyncio.ensure_future(adapter.enqueue([(0, batch), (1, batch)], sequence=sequence)))
        if len(window) == 8:
            await window.pop(0)
            print(number - 7, flush=True)
    await asyncio.gather(*window)
    print(limit, flush=True)
    await adapter.aclose()

asyncio.run(main())
"""


def check_whole(batch: EventBatch) -> int:
    """The number of a published batch, all of whose events are there."""
    payloads = batch.payloads()
    number = int(payloads[0].split(b".")[0])
    assert payloads == [b"%d.%d" % (number, part) for part in range(10)]
    return number


async def read_until(adapter: LogAdapter, queue: int, count: int) -> dict[str, list[int]]:
    """Numbers by stream, in the order of the queue, from its first batch to the `count`th."""
    receiver = await adapter.open_receiver(queue, 0)
    found: dict[str, list[int]] = {}
    while sum(map(len, found.values())) < count:
        for batch in (await receiver.receive(1000, 1 << 20)).batches:
            found.setdefault(batch.stream.key, []).append(check_whole(batch))
    return found


async def test_processes_publish_and_read_one_log_at_once(open_log: OpenLog, run_script: RunScript):
    adapter = await open_log()
    publishers = [run_script(PUBLISHER, name, "commit", 500) for name in ("a", "b")]
    found = await asyncio.gather(read_until(adapter, 0, 1000), read_until(adapter, 1, 1000))
    for queue in found:
        assert queue == {"a": list(range(1, 501)), "b": list(range(1, 501))}
    for publisher in publishers:
        await asyncio.to_thread(publisher.communicate)
        assert publisher.returncode == 0


@pytest.mark.parametrize("durability", ["commit", "relaxed"])
async def test_events_that_a_killed_publisher_was_promised_are_stored(
    open_log: OpenLog, run_script: RunScript, durability: str
):
    promised = 0
    for _ in range(5):
        publisher = run_script(PUBLISHER, "a", durability, 1_000_000)
        assert publisher.stdout is not None
        until = promised + random.randint(1, 200)
        while promised < until:
            promised = int(await asyncio.to_thread(publisher.stdout.readline))
        publisher.send_signal(signal.SIGKILL)
        rest, _ = await asyncio.to_thread(publisher.communicate)
        promised = max([promised, *map(int, rest.rpartition("\n")[0].split())])
        adapter = await open_log(durability=durability)
        stored = (await adapter.bounds(0)).next
        assert stored >= promised
        assert await adapter.last_sequence("a") == stored
        for queue in (0, 1):
            assert await read_until(adapter, queue, stored) == {"a": list(range(1, stored + 1))}
        await adapter.aclose()


async def test_the_database_is_sound_after_its_writer_was_killed(
    open_log: OpenLog, run_script: RunScript, tmp_path: Path
):
    publisher = run_script(PUBLISHER, "a", "commit", 1_000_000)
    assert publisher.stdout is not None
    for _ in range(100):
        await asyncio.to_thread(publisher.stdout.readline)
    publisher.send_signal(signal.SIGKILL)
    await asyncio.to_thread(publisher.communicate)
    await (await open_log()).aclose()
    assert verify(tmp_path / "log") == []


READER = """
import lmdb, sys
environment = lmdb.open(sys.argv[1] + "/log", max_readers=1022)
reading = environment.begin()
print("reading", flush=True)
sys.stdin.read()
"""
READERS = "import lmdb, sys; print(lmdb.open(sys.argv[1] + '/log', max_readers=1022).readers())"


async def kill_a_reader(run_script: RunScript) -> int:
    reader = run_script(READER)
    assert reader.stdout is not None
    assert await asyncio.to_thread(reader.stdout.readline) == "reading\n"
    reader.send_signal(signal.SIGKILL)
    await asyncio.to_thread(reader.communicate)
    return reader.pid


async def test_a_killed_reader_does_not_keep_deleted_space_for_ever(open_log: OpenLog, run_script: RunScript):
    adapter = await open_log(retain_bytes=100_000, map_bytes=8 << 20)
    batch = EventBatch.of(StreamId("tests", "killed"), [b"x" * 50_000])
    await adapter.enqueue([(0, batch)])
    await kill_a_reader(run_script)
    for _ in range(20):
        for _ in range(20):
            await adapter.enqueue([(0, batch)])
        await adapter.apply_retention({})


async def test_opening_forgets_killed_readers(open_log: OpenLog, run_script: RunScript):
    await open_log()
    killed = await kill_a_reader(run_script)
    listed, _ = await asyncio.to_thread(run_script(READERS).communicate)
    assert str(killed) in listed.split()
    await asyncio.to_thread(run_script(PUBLISHER, "a", "commit", 1).communicate)
    listed, _ = await asyncio.to_thread(run_script(READERS).communicate)
    assert str(killed) not in listed.split()
