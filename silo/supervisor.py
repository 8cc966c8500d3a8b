"""Run several silos on one machine as a cluster, each in a process of its own, and restart those that end.

A worker gets its configuration as one line on its stdin, which stays open. When stdin ends, the supervisor is gone, and
the worker stops in order. Over another pipe the worker reports that it is ready, or why it could not start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import msgspec

from ..streams.background import BackgroundTasks, end
from ..streams.backoff import Backoff
from ..streams.errors import InvalidArgument
from ..streams.outcomes import DONE, FAILED, USAGE, CommandFailed
from .addresses import parse_address
from .config import ClusterConfig, SiloConfig, check

log = logging.getLogger("headrace.silo")

PROGRAM = (sys.executable, "-P", "-m", "headrace.cli.worker")
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Pause before a worker that died starts again, in seconds. It doubles with each death, up to the maximum."""
LAST_STATUS_S = 0.5
"""How long to wait for the status of a worker that ended, in seconds: a child process may keep its pipe open."""
STEADY_S = 10.0
"""A worker that was ready for so many seconds starts again at once."""


class WorkerStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """The report of a worker: it is ready, or it has failed."""

    address: str = ""
    """Address of gRPC. Set when the worker is ready."""
    error: str = ""
    """The reason of its end. Set when it failed."""
    option: str = ""
    """The wrong option, if the reason is one. `error` does not repeat it."""


def configurations(config: SiloConfig, workers: int) -> Sequence[SiloConfig]:
    """Return the configuration of each worker. Each has its own name and ports, which stay the same over restarts.

    Raises InvalidArgument for options that contradict each other, OSError if the addresses cannot be used.
    """
    if config.grpc.port is None:
        raise InvalidArgument("workers call each other by gRPC: give its port (--listen HOST:PORT, or grpc.port)")
    cluster = config.cluster or ClusterConfig()
    name = cluster.name or socket.gethostname()
    grpc = _ports("grpc.port", config.grpc.host, config.grpc.port, workers)
    first = config.grpc.native_port
    native = _ports("grpc.native_port", config.grpc.host, first, workers) if first else [0] * workers
    http = _ports("http.port", config.http.host, config.http.port, workers)
    if taken := sorted(port for port in {*grpc, *native} & {*http} if port):
        raise InvalidArgument(
            f"http.port: {workers} workers take {workers} ports from each given one on, so gRPC and HTTP would both "
            f"take port {taken[0]}: give ports that are at least {workers} apart"
        )
    made = [
        msgspec.structs.replace(
            config,
            workers=None,
            grpc=msgspec.structs.replace(config.grpc, port=grpc_port, native_port=native_port),
            http=msgspec.structs.replace(config.http, port=http_port),
            cluster=msgspec.structs.replace(
                cluster,
                name=f"{name}-{number}",
                address=_address_of(cluster.address, grpc_port),
                public_address=_address_of(cluster.public_address, grpc_port),
            ),
        )
        for number, grpc_port, native_port, http_port in zip(range(1, workers + 1), grpc, native, http, strict=True)
    ]
    for one in made:
        check(one)
    return made


def _ports(option: str, host: str, first: int | None, count: int) -> Sequence[int | None]:
    """Return `count` consecutive ports from `first` on, or free ports if `first` is 0."""
    if first is None:
        return [None] * count
    if first + count - 1 > 65535:
        raise InvalidArgument(f"{option}: {count} workers from port {first} on would need ports above 65535")
    return list(range(first, first + count)) if first else _free_ports(host, count)


def _free_ports(host: str, count: int) -> list[int]:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket(family, kind, protocol)) for _ in range(count)]
        for probe in probes:
            probe.bind(address)
        return [probe.getsockname()[1] for probe in probes]


def _address_of(address: str | None, port: int | None) -> str | None:
    """Return the host of the workers' address with the port of one worker."""
    if address is None:
        return None
    host, _ = parse_address(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class WorkerExit(NamedTuple):
    """How a worker's process ended."""

    code: int
    reported: WorkerStatus
    """The last status of the worker."""
    ready_s: float | None
    """How long it was ready, in seconds. None: never."""

    @property
    def in_order(self) -> bool:
        """Also if SIGTERM ended it before it was ready."""
        return self.code == DONE or (self.ready_s is None and self.code == -signal.SIGTERM)

    @property
    def why(self) -> str:
        if self.reported.error:
            return ": ".join(part for part in (self.reported.option, self.reported.error) if part)
        if self.code == DONE:
            return "it was stopped"
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        return f"exit code {self.code}"


class SiloWorker:
    """One silo in a process of its own: of the cluster, or of `headrace dev`. It has one process at a time."""

    def __init__(self, config: SiloConfig) -> None:
        self.name = (config.cluster.name if config.cluster is not None else None) or "silo"
        self.started = asyncio.Event()
        """Set when it has a process, to which signals are sent."""
        self.ready = asyncio.Event()
        """Set when it was ready for the first time."""
        self.address = ""
        self._line = msgspec.json.encode(config) + b"\n"
        self._process: asyncio.SubprocessTransport | None = None
        self._reported = WorkerStatus()
        self._ready_at: float | None = None

    async def run(self) -> WorkerExit:
        """Start the process, and wait for its end."""
        loop = asyncio.get_running_loop()
        self._reported, self._ready_at = WorkerStatus(), None
        theirs, ours = _pipe()
        with open(ours, "rb", buffering=0) as reports:  # noqa: PTH123, ASYNC230 (a pipe)
            try:
                self._process, ending = await _start(theirs, self._line)
                self.started.set()
            finally:
                os.close(theirs)
            reader = asyncio.StreamReader()
            reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), reports)
            listening = asyncio.create_task(self._listen(reader), name=f"headrace reports of {self.name}")
            try:
                code = await ending.ended
                with suppress(TimeoutError):
                    await asyncio.wait_for(listening, LAST_STATUS_S)
            finally:
                listening.cancel()
                reading.close()
            self._process.close()
        self._process = None
        return WorkerExit(code, self._reported, None if self._ready_at is None else loop.time() - self._ready_at)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        async for line in reader:
            status = msgspec.json.decode(line, type=WorkerStatus)
            self._reported = status
            if status.address:
                self.address, self._ready_at = status.address, asyncio.get_running_loop().time()
                self.ready.set()
                if self._process is not None:
                    log.info("worker %r is process %d", self.name, self._process.get_pid())

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.get_returncode() is None:
            self._process.send_signal(number)


class _Ending(asyncio.SubprocessProtocol):
    """Notices the end of the process itself. `asyncio.subprocess.Process.wait` also waits for the pipes, which child
    processes may keep open."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process: asyncio.SubprocessTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._process = transport

    def process_exited(self) -> None:
        assert self._process is not None
        code = self._process.get_returncode()
        assert code is not None
        if not self.ended.done():
            self.ended.set_result(code)


async def _start(reports: int, line: bytes) -> tuple[asyncio.SubprocessTransport, _Ending]:
    """Start a worker's process. It reads `line`, and writes its status to the file descriptor `reports`."""
    process, ending = await asyncio.get_running_loop().subprocess_exec(
        _Ending, *PROGRAM, str(reports), stdout=None, stderr=None, pass_fds=[reports], process_group=0
    )
    stdin = process.get_pipe_transport(0)
    assert isinstance(stdin, asyncio.WriteTransport)
    stdin.write(line)
    return process, ending


def _pipe() -> tuple[int, int]:
    """Return a pipe's ends: to write, and to read."""
    reading, writing = os.pipe()
    return writing, reading


class WorkerSupervisor:
    """Keeps the workers running. Call `run` once."""

    def __init__(self, configs: Sequence[SiloConfig], ready: Callable[[], object] = lambda: None) -> None:
        """`ready` is called once, when all workers are ready."""
        self.workers = [SiloWorker(config) for config in configs]
        self._ready = ready
        self._stopping = asyncio.Event()
        self._failed = False

    def stop(self) -> None:
        """Stop all workers in order."""
        log.info("supervisor stops its %d workers", len(self.workers))
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all workers."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self.workers:
            worker.signal(number)

    async def run(self) -> int:
        """Keep all workers running until `stop`. Return the exit code.

        The first worker starts alone. An error at its start would stop the others too, so it is raised as
        InvalidArgument or Failed.
        """
        first, *others = self.workers
        leading = asyncio.create_task(self._lead(first), name=f"headrace worker {first.name}")
        await _either(leading, first.ready)
        if leading.done():
            return leading.result() or self._code
        keeping = [asyncio.create_task(self._keep(each), name=f"headrace worker {each.name}") for each in others]
        async with BackgroundTasks() as background:
            background.start(self._log_ready(), "headrace workers ready")
            await asyncio.gather(leading, *keeping)
        return self._code

    @property
    def _code(self) -> int:
        return FAILED if self._failed else DONE

    async def _log_ready(self) -> None:
        for worker in self.workers:
            await worker.ready.wait()
        self._ready()
        addresses = ",".join(worker.address for worker in self.workers)
        log.info("all %d workers are ready: gRPC on %s", len(self.workers), addresses)

    async def _lead(self, worker: SiloWorker) -> int:
        ended = await worker.run()
        if not worker.ready.is_set() and not self._stopping.is_set():
            if ended.reported.error and ended.code == USAGE:
                raise InvalidArgument(ended.reported.error, option=ended.reported.option)
            raise CommandFailed(
                ended.reported.error or f"worker {worker.name!r} ended before it was ready: {ended.why}"
            )
        await self._restart(worker, ended)
        return DONE

    async def _keep(self, worker: SiloWorker) -> None:
        if not self._stopping.is_set():
            await self._restart(worker, await worker.run())

    async def _restart(self, worker: SiloWorker, ended: WorkerExit) -> None:
        """Start the worker again each time that it ends, until `stop`."""
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while not self._stopping.is_set():
            steady = (ended.ready_s or 0.0) >= STEADY_S or ended.code == DONE
            if steady:
                backoff.reset()
            pause_s = 0.0 if steady else backoff.next_s()
            when = f"in {pause_s:g} s" if pause_s else "now"
            log.warning("worker %r ended: %s; it starts again %s", worker.name, ended.why, when)
            if await self._stopped_within(pause_s):
                return
            ended = await worker.run()
        if not ended.in_order:
            self._failed = True
            log.error("worker %r did not stop in order: %s", worker.name, ended.why)

    async def _stopped_within(self, pause_s: float) -> bool:
        try:
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True


async def _either(task: asyncio.Task[int], event: asyncio.Event) -> None:
    waiting = asyncio.create_task(event.wait(), name="headrace worker ready")
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    await end(waiting)
