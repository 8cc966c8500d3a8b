"""taskiq: jobs in a stream of Redis, which are acknowledged; delayed ones in its scheduler's lists of each minute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from .kinds import DelayKind, Handle, Place, Push, running

CONNECTIONS = 100
SCHEDULER_S = 1.0
"""So often the scheduler asks for new schedules, where by default it is once a minute. It sends once a second."""


class Taskiq(DelayKind):
    connections = 1
    requires = ("taskiq", "taskiq_redis")

    @asynccontextmanager
    async def producer(self, place: Place) -> AsyncGenerator[Push]:
        broker, source = _open(place)
        job = broker.register_task(_nothing, task_name="handle")
        await broker.startup()

        async def push(payloads: Sequence[bytes], delays_s: Sequence[float]) -> None:
            if delays_s:
                now = datetime.now(UTC)
                times = [now + timedelta(seconds=s) for s in delays_s]
                calls = (job.schedule_by_time(source, at, p.decode()) for at, p in zip(times, payloads, strict=True))
            else:
                calls = (job.kiq(payload.decode()) for payload in payloads)
            await asyncio.gather(*calls)

        try:
            yield push
        finally:
            await source.shutdown()
            await broker.shutdown()

    @asynccontextmanager
    async def consumer(self, place: Place, batch: int, handle: Handle) -> AsyncGenerator[None]:
        from taskiq import TaskiqScheduler  # noqa: PLC0415
        from taskiq.api import run_scheduler_task  # noqa: PLC0415
        from taskiq.receiver import Receiver  # noqa: PLC0415

        async def job(payload: str) -> None:
            handle([payload.encode()])

        broker, source = _open(place)
        broker.register_task(job, task_name="handle")
        broker.is_worker_process = True
        await broker.startup()
        look = timedelta(seconds=SCHEDULER_S)
        schedules = run_scheduler_task(TaskiqScheduler(broker, [source]), interval=look, loop_interval=look)
        receiver = Receiver(broker, run_startup=False, max_async_tasks=CONNECTIONS, max_prefetch=CONNECTIONS)
        finish = asyncio.Event()
        listening = asyncio.create_task(receiver.listen(finish))
        try:
            async with running(schedules):
                yield
        finally:
            finish.set()
            await listening
            await source.shutdown()
            await broker.shutdown()


def _open(place: Place) -> tuple[Any, Any]:
    from taskiq_redis import ListRedisScheduleSource, RedisStreamBroker  # noqa: PLC0415

    # With a timeout, redis-py 8 may swallow in Python 3.11 the cancellation by which taskiq ends.
    options: Any = {"max_connection_pool_size": CONNECTIONS, "socket_timeout": None}
    broker = RedisStreamBroker(place.url, consumer_id="0", xread_block=100, **options)
    return broker, ListRedisScheduleSource(place.url, **options)


async def _nothing(payload: str) -> None:
    """What the producer knows of the job."""
