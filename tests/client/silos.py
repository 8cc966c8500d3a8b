"""A silo as a process that can be killed and started again, on the same data and the same port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

from headrace import EventBatch, Start, StreamId
from headrace.silo.provider import Provider
from tests.cli.commandline import ENVIRONMENT
from tests.cli.forking import Process, forking
from tests.serving import SERVING

READY = re.compile(rb"silo is ready: .*; gRPC on (\S+)")


class SiloProcess:
    """`headrace silo` with its data in `folder`. `flags` are those of the command."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.data = folder / "d"
        self.address = "127.0.0.1:0"
        self._flags = flags
        self._process: Process | None = None
        self._reader: Thread | None = None

    def start(self, *more: str) -> str:
        """Start it, or start it again, with more flags, and return its address when it serves."""
        arguments = ["silo", "--data", str(self.data), "--listen", self.address, *self._flags, *more]
        environment = ENVIRONMENT | {"HEADRACE_GRPC__NATIVE": str(SERVING.native).lower()}
        self._process = forking().start(arguments, cwd=self.folder, env=environment, stderr=subprocess.PIPE)
        assert self._process.stderr is not None
        lines: list[bytes] = []
        for line in self._process.stderr:
            lines.append(line)
            if match := READY.search(line):
                self.address = match[1].decode()
                self._reader = Thread(target=self._process.stderr.read, daemon=True)  # a full pipe would stop it
                self._reader.start()
                return self.address
        raise AssertionError(b"".join(lines).decode())

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, also of one that is stopped."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Tell it to stop in order, and wait until it has."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        process.wait(60)
        if self._reader is not None:
            self._reader.join(60)
        assert process.stderr is not None
        process.stderr.close()


async def stored(data: Path) -> dict[StreamId, list[bytes]]:
    """All events on a data directory that no silo has open, by stream, in order."""
    found: defaultdict[StreamId, list[bytes]] = defaultdict(list)

    async def note(batch: EventBatch) -> None:
        found[batch.stream] += batch.payloads()

    async with Provider.open(data) as provider:
        subscription = await provider.subscribe("look", "*/*", note, batch=True, start=Start.earliest())
        await subscription.caught_up()
        await subscription.delete()
    return dict(found)


Silos = Callable[..., SiloProcess]


@pytest.fixture
def silos(tmp_path: Path) -> Iterator[Silos]:
    """Start silos, with flags of `headrace silo`; killed at the end of the test."""
    started: list[SiloProcess] = []

    def start(*flags: str, folder: str = ".") -> SiloProcess:
        silo = SiloProcess(tmp_path / folder, *flags)
        started.append(silo)
        silo.start()
        return silo

    yield start
    for silo in started:
        silo.kill()


@pytest.fixture
def silo(silos: Silos) -> SiloProcess:
    """A silo that needs no token."""
    return silos()
