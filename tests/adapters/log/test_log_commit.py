"""Group commit: what shares a commit, and what happens when one fails."""

import asyncio
import fcntl
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from subprocess import Popen

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import DataDirectoryError, EventBatch, SequenceConflict, StorageError, StorageFull, StreamId
from headrace.adapters import Bounds, ProducerSequence
from headrace.adapters.group_commit import groups
from headrace.adapters.log import LogAdapter, LogOptions
from headrace.adapters.log.acknowledgements import PendingAcknowledgements
from headrace.adapters.log.blocks import BlockEncoder
from headrace.adapters.log.environment import LogEnvironment, acquire, release
from headrace.adapters.log.group import CommitGroup, CommitRequest
from headrace.adapters.log.limits import LogLimits
from headrace.adapters.log.timesearch import offset_at

OpenLog = Callable[..., Awaitable[LogAdapter]]
STREAM = StreamId("tests", "commit")


def batch(payload: bytes) -> EventBatch:
    return EventBatch.of(STREAM, [payload])


async def everything(adapter: LogAdapter, queue: int = 0) -> list[bytes]:
    receiver = await adapter.open_receiver(queue, 0)
    end = (await adapter.bounds(queue)).next
    payloads: list[bytes] = []
    at = 0
    while at < end:
        received = await receiver.receive(1 << 20, 1 << 30)
        payloads += [payload for part in received.batches for payload in part.payloads()]
        at = received.next_offset
    return payloads


async def fill(adapter: LogAdapter, payload: bytes) -> int:
    """Publish until there is no space. Returns how many were stored."""
    stored = 0
    try:
        while True:
            await adapter.enqueue([(0, batch(b"%08d" % stored + payload))])
            stored += 1
    except StorageFull:
        return stored


async def test_concurrent_calls_share_a_commit(open_log: OpenLog):
    adapter = await open_log()
    await asyncio.gather(*(adapter.enqueue([(0, batch(b"x"))]) for _ in range(1000)))
    one_block = (await adapter.statistics(0)).bytes
    assert one_block == 24 + 1000 * (12 + batch(b"x").nbytes)


async def test_a_call_is_one_commit_however_many_bytes(open_log: OpenLog):
    adapter = await open_log(group_bytes=1)
    await adapter.enqueue([(0, batch(b"x")), (0, batch(b"y"))])
    assert (await adapter.statistics(0)).bytes == 24 + 2 * (12 + batch(b"x").nbytes)


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 50))
def test_groups_end_with_the_call_that_reaches_the_limit(sizes: list[int], limit: int):
    loop = asyncio.new_event_loop()
    calls = [CommitRequest((), size, loop.create_future()) for size in sizes]
    loop.close()
    found = list(groups(calls, limit))
    assert [call for group in found for call in group] == calls
    for group in found:
        assert sum(call.nbytes for call in group[:-1]) < limit
    for group in found[:-1]:
        assert sum(call.nbytes for call in group) >= limit


def test_commit_times_never_go_back(tmp_path: Path):
    environment = acquire(tmp_path / "log", LogOptions(), "tests", 1)
    with asyncio.Runner() as runner:
        answer = runner.get_loop().create_future()
        for now_us in (100, 50, 200):
            with environment.writing() as changes:
                group = CommitGroup(changes, BlockEncoder(), now_us)
                group.add(CommitRequest([(0, batch(b"x"))], 1, answer))
                assert set(group.write()) == {0}
    with environment.reading() as snapshot:
        assert [snapshot.header(0, offset).time_us for offset in range(3)] == [100, 100, 200]
        found = [offset_at(snapshot, 0, time_us) for time_us in (0, 100, 101, 200, 201)]
    release(environment)
    assert found == [0, 0, 2, 2, 3]


def test_a_log_that_was_replaced_is_not_opened_again(tmp_path: Path):
    log, other = tmp_path / "log", tmp_path / "other"
    release(acquire(other, LogOptions(), "tests", 1))
    environment = acquire(log, LogOptions(), "tests", 1)
    (other / "data.mdb").rename(log / "data.mdb")
    with pytest.raises(DataDirectoryError, match="deleted or replaced"):
        environment.reopen()  # as after a failed write of the meta page
    release(environment)


def test_acknowledgement_during_a_store_is_not_forgotten():
    acknowledgements = PendingAcknowledgements()
    acknowledgements.note(0, 5)
    acknowledgements.note(1, 3)
    stored = acknowledgements.pending()
    acknowledgements.note(0, 7)
    acknowledgements.forget(stored)
    assert [acknowledgements.noted(queue) for queue in (0, 1)] == [7, 0]


@pytest.mark.parametrize(("durability", "expected"), [("relaxed", True), ("commit", False)])
async def test_relaxed_commits_are_synced_in_the_background(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch, durability: str, expected: bool
):
    synced, chores = threading.Event(), threading.Semaphore(0)
    sync, pending = LogEnvironment.sync, PendingAcknowledgements.pending

    def seen_sync(environment: LogEnvironment) -> None:
        sync(environment)
        synced.set()

    def seen_chores(acknowledgements: PendingAcknowledgements) -> Mapping[int, int]:
        chores.release()
        return pending(acknowledgements)

    monkeypatch.setattr(LogEnvironment, "sync", seen_sync)
    monkeypatch.setattr(PendingAcknowledgements, "pending", seen_chores)
    adapter = await open_log(durability=durability, limits=LogLimits(chores_s=0.001))
    await adapter.enqueue([(0, batch(b"x"))])
    for _ in range(100):
        await asyncio.to_thread(chores.acquire)
        if synced.is_set():
            break
    assert synced.is_set() == expected


def test_reopening_waits_for_readers(tmp_path: Path):
    environment = acquire(tmp_path / "log", LogOptions(), "tests", 1)
    reopening = threading.Thread(target=environment.reopen)
    with environment.reading() as snapshot:
        reopening.start()
        reopening.join(0.05)
        assert reopening.is_alive()
        assert snapshot.tail(0).next == 0
    reopening.join()
    with environment.reading() as snapshot:
        assert snapshot.tail(0).next == 0
    release(environment)


async def test_a_full_log_fails_the_calls_and_loses_nothing(open_log: OpenLog):
    adapter = await open_log(map_bytes=1 << 20)
    stored = await fill(adapter, b"x" * 10_000)
    found = await everything(adapter)
    assert [int(payload[:8]) for payload in found] == list(range(stored))
    assert await adapter.bounds(0) == Bounds(0, stored)


async def test_a_full_log_takes_more_once_something_was_deleted(open_log: OpenLog):
    adapter = await open_log(map_bytes=1 << 20, retain_bytes=500_000)
    for size in (100_000, 10_000, 1_000, 1):
        await fill(adapter, b"x" * size)
    await adapter.apply_retention({})
    assert await fill(adapter, b"y" * 10_000) > 10


async def test_all_calls_of_a_failed_commit_fail_and_none_is_stored(open_log: OpenLog):
    adapter = await open_log(map_bytes=1 << 20)
    small, large = adapter.enqueue([(0, batch(b"x"))]), adapter.enqueue([(0, batch(b"x" * 1_048_000))])
    answers = await asyncio.gather(small, large, return_exceptions=True)
    assert [type(answer) for answer in answers] == [StorageFull, StorageFull]
    assert answers[0] is not answers[1]
    assert await adapter.bounds(0) == Bounds(0, 0)
    await adapter.enqueue([(0, batch(b"x"))])


async def test_after_a_failed_commit_a_producer_leaves_no_hole(open_log: OpenLog):
    adapter = await open_log(map_bytes=1 << 20)
    await adapter.enqueue([(0, batch(b"x"))], sequence=ProducerSequence("p", 1, 0))
    failed = adapter.enqueue([(0, batch(b"x" * 1_048_000))], sequence=ProducerSequence("p", 2, 1))
    with pytest.raises(StorageFull):
        await failed
    with pytest.raises(SequenceConflict):
        await adapter.enqueue([(0, batch(b"y"))], sequence=ProducerSequence("p", 3, 2))
    await adapter.enqueue([(0, batch(b"z"))], sequence=ProducerSequence("p", 2, 1))
    assert await everything(adapter) == [b"x", b"z"]


async def test_a_cancelled_call_does_not_disturb_the_others(open_log: OpenLog):
    adapter = await open_log()
    cancelled, other = adapter.enqueue([(0, batch(b"a"))]), adapter.enqueue([(0, batch(b"b"))])
    asyncio.ensure_future(cancelled).cancel()
    await other
    assert await everything(adapter) == [b"a", b"b"]


def break_synchronous_writes(log: Path) -> None:
    """Make writing LMDB's meta page fail: the descriptor that it uses for that becomes a read-only one."""
    read_only = os.open(log / "data.mdb", os.O_RDONLY)
    broken = 0
    for name in Path("/proc/self/fd").iterdir():
        descriptor = int(name.name)
        try:
            is_log = os.path.sameopenfile(descriptor, read_only)
        except OSError:
            continue
        if is_log and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DSYNC:
            os.dup2(read_only, descriptor)
            broken += 1
    os.close(read_only)
    assert broken == 1


async def test_the_log_goes_on_after_its_meta_page_could_not_be_written(open_log: OpenLog, tmp_path: Path):
    adapter, other = await open_log(), await open_log()
    await adapter.enqueue([(0, batch(b"a"))])
    break_synchronous_writes(tmp_path / "log")
    with pytest.raises(StorageError):
        await adapter.enqueue([(0, batch(b"b"))])
    assert await everything(other) == [b"a"]
    await adapter.enqueue([(0, batch(b"c"))])
    await other.enqueue([(0, batch(b"d"))])
    assert await everything(adapter) == [b"a", b"c", b"d"]


LIMITED = """
import asyncio, resource, sys
from pathlib import Path
from headrace.adapters import AdapterContext, open_adapter
from headrace import EventBatch, StorageFull, StreamId

async def main():
    adapter = await open_adapter("log", AdapterContext(provider="tests", queues=2, directory=Path(sys.argv[1])), {})
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    number = 0
    async def publish(size):
        nonlocal number
        await adapter.enqueue([(0, EventBatch.of(StreamId("tests", "limited"), [b"%08d" % number + b"x" * size]))])
        number += 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))
    try:
        while True:
            await publish(30_000)
    except StorageFull as error:
        print("full", number, error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    for _ in range(10):
        await publish(30_000)
    print("stored", number)
    await adapter.aclose()

asyncio.run(main())
"""


async def test_a_disk_that_is_full_for_a_while_loses_nothing(open_log: OpenLog, run_script: Callable[..., Popen[str]]):
    output, _ = await asyncio.to_thread(run_script(LIMITED).communicate)
    full, stored = output.splitlines()
    assert "no space left" in full
    number = int(stored.split()[1])
    found = await everything(await open_log())
    assert [int(payload[:8]) for payload in found] == list(range(number))
    assert number > 20


async def test_log_whose_folder_became_a_file_refuses_events_and_closes(open_log: OpenLog, tmp_path: Path):
    adapter = await open_log(limits=LogLimits(chores_s=0.001))
    await adapter.enqueue([(0, batch(b"x"))])
    receiver = await adapter.open_receiver(0, 0)
    (tmp_path / "log").rename(tmp_path / "moved")
    (tmp_path / "log").touch()
    await receiver.acknowledge(1)  # to be stored by the chores
    await asyncio.sleep(0.1)
    async with asyncio.timeout(10):
        with pytest.raises(DataDirectoryError, match="deleted or replaced"):
            await adapter.enqueue([(0, batch(b"y"))])
        await adapter.aclose()


async def test_committer_goes_on_after_chores_that_fail_in_an_unexpected_way(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
):
    adapter = await open_log(limits=LogLimits(chores_s=0.001))
    await adapter.enqueue([(0, batch(b"x"))])
    receiver = await adapter.open_receiver(0, 0)

    def fail(_: PendingAcknowledgements) -> None:
        raise LookupError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(PendingAcknowledgements, "pending", fail)
        await receiver.acknowledge(1)
        await asyncio.sleep(0.1)
    async with asyncio.timeout(10):
        await adapter.enqueue([(0, batch(b"y"))])
        await adapter.aclose()
