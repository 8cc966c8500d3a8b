"""The tasks that call handlers: how many there are, and when another one starts."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

import pytest

from headrace.streams.handler_workers import HandlerWorkers

Job = Callable[[], Awaitable[object]]
log = logging.getLogger("headrace.test")


class Jobs:
    """Jobs that wait, and workers that run them."""

    def __init__(self, concurrency: int) -> None:
        self.waiting = deque[Job]()
        self.stopping = False
        self.running = self.most = 0
        self.workers = HandlerWorkers(
            "jobs", concurrency, self.work, lambda: bool(self.waiting) and not self.stopping, log
        )

    def add(self, *jobs: Job) -> None:
        self.waiting += jobs
        self.workers.wake()

    async def work(self) -> None:
        if self.waiting:
            self.workers.wake()
        while self.waiting and not self.stopping:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self.waiting.popleft()()
            finally:
                self.running -= 1


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_jobs_that_do_not_suspend_share_a_worker() -> None:
    tasks = set[object]()

    async def note() -> None:
        tasks.add(asyncio.current_task())

    Jobs(10).add(*[note] * 100)
    await turns()
    assert len(tasks) == 1


async def test_as_many_workers_run_as_jobs_suspend_up_to_the_concurrency() -> None:
    jobs = Jobs(3)
    jobs.add(*[asyncio.Event().wait] * 5)
    await turns()
    assert (jobs.most, len(jobs.waiting)) == (3, 2)
    jobs.stopping = True
    await jobs.workers.stop(0.0)
    assert jobs.running == 0


async def test_a_job_that_comes_while_a_worker_yields_does_not_wait_for_that_worker() -> None:
    jobs, done = Jobs(10), asyncio.Event()

    async def second() -> None:
        done.set()

    async def first() -> None:
        asyncio.get_running_loop().call_soon(jobs.add, second)
        for _ in range(5):
            await jobs.workers.yield_turn()
        await asyncio.Event().wait()

    jobs.add(first)
    async with asyncio.timeout(5):
        await done.wait()
    jobs.stopping = True
    await jobs.workers.stop(0.0)


async def test_a_worker_that_fails_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    jobs, done = Jobs(10), asyncio.Event()

    async def fail() -> None:
        raise ValueError("a bug")

    async def succeed() -> None:
        done.set()

    jobs.add(fail, succeed)
    async with asyncio.timeout(5):
        await done.wait()
    assert [record.message for record in caplog.records] == ["delivery of jobs failed and goes on"]


async def test_stopping_says_which_handlers_ignore_their_cancellation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs, released = Jobs(10), asyncio.Event()

    async def stubborn() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    jobs.add(stubborn)
    await turns()
    jobs.stopping = True
    await jobs.workers.stop(0.01, cancel_s=0.05)
    released.set()
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    await turns()
