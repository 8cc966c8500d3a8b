"""Fixtures of the tests of the log adapter."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

from headrace.adapters import AdapterContext
from headrace.adapters.log import LogAdapter, open_adapter
from headrace.adapters.log.limits import LOG_LIMITS, LogLimits

OpenLog = Callable[..., Awaitable[LogAdapter]]


@pytest.fixture
async def open_log(tmp_path: Path) -> AsyncIterator[OpenLog]:
    """Opens handles of one log with the given number of queues and options; all are closed at the end."""
    async with AsyncExitStack() as stack:

        async def open_one(
            queues: int = 2, directory: Path = tmp_path, limits: LogLimits = LOG_LIMITS, **options: Any
        ) -> LogAdapter:
            context = AdapterContext(provider="tests", queues=queues, directory=directory)
            adapter = await open_adapter(context, options, limits)
            stack.push_async_callback(adapter.aclose)
            return adapter

        yield open_one


@pytest.fixture
def run_script(tmp_path: Path) -> Iterator[Callable[..., Popen[str]]]:
    """Starts a Python program in a process of its own; `argv[1]` is the log's directory."""
    started: list[Popen[str]] = []

    def run(program: str, *arguments: object) -> Popen[str]:
        command = [sys.executable, "-c", program, str(tmp_path), *map(str, arguments)]
        process = Popen(command, stdin=PIPE, stdout=PIPE, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()
