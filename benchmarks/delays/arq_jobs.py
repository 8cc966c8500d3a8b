"""arq: jobs by due time in a sorted set, each with a key of its own.

It refuses the redis-py that headrace needs (arq 0.28: below 6), so it is put into a folder of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..servers import INSTALL, NotAvailable
from .kinds import DelayKind, Handle, Place, Push, running

REQUIREMENT = "arq>=0.26"
JOBS = 100
POLL_S = 0.05
"""Where by default it is half a second."""


class Arq(DelayKind):
    connections = 1

    def packages(self) -> str:
        return _installed()

    @asynccontextmanager
    async def producer(self, place: Place) -> AsyncGenerator[Push]:
        arq = _arq(place)
        pool = await arq.create_pool(_settings(arq, place))

        async def push(payloads: Sequence[bytes], delays_s: Sequence[float]) -> None:
            delays = delays_s or [None] * len(payloads)
            calls = (pool.enqueue_job("handle", p, _defer_by=s) for p, s in zip(payloads, delays, strict=True))
            await asyncio.gather(*calls)

        try:
            yield push
        finally:
            await pool.aclose()

    @asynccontextmanager
    async def consumer(self, place: Place, batch: int, handle: Handle) -> AsyncGenerator[None]:
        async def job(_: Any, payload: bytes) -> None:
            handle([payload])

        arq = _arq(place)
        worker = arq.Worker(
            functions=[arq.func(job, name="handle")],
            redis_settings=_settings(arq, place),
            max_jobs=JOBS,
            poll_delay=POLL_S,
            keep_result=0,
            handle_signals=False,
        )
        try:
            async with running(worker.async_run()):
                yield
        finally:
            await worker.pool.aclose()


def _arq(place: Place) -> Any:
    sys.path.insert(0, place.packages)
    return importlib.import_module("arq")


def _settings(arq: Any, place: Place) -> Any:
    return arq.connections.RedisSettings.from_dsn(place.url)


@functools.cache
def _installed() -> str:
    """A folder with arq and its redis-py, for as long as this process runs. Raises NotAvailable."""
    if os.environ.get(INSTALL) != "1":
        raise NotAvailable(f"it needs an older redis-py than headrace; with {INSTALL}=1 both are installed apart")
    made = tempfile.TemporaryDirectory(prefix="headrace-arq-")
    atexit.register(made.cleanup)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", made.name)
    done = subprocess.run((*pip, REQUIREMENT), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAvailable(f"pip could not install {REQUIREMENT}: {done.stderr.strip()[-300:]}")
    return made.name
