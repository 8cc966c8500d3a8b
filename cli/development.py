"""Runs a silo for `headrace dev`, and starts it again when a file of the project changes.

The silo is a process of its own, so that each start imports the changed modules anew. It gets its configuration as a
worker of a supervisor does, and stops in order: running handlers have a second to end, and unfinished events are
delivered again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec
from watchfiles import Change, DefaultFilter
from watchfiles import awatch as watch_files  # pyright: ignore[reportUnknownVariableType] (trio may be missing)

from ..server.config import GrpcConfig, HttpConfig, is_loopback
from ..silo.config import SiloConfig, check
from ..silo.config_loader import check_variables, load_config
from ..silo.supervisor import SiloWorker
from ..store.datadir import open_data_directory
from ..streams.background import BackgroundTasks, first_of
from ..streams.errors import Busy, InvalidArgument
from ..streams.outcomes import DONE, FAILED
from .commands.running import handle_signals
from .log_format import log_to_stderr

log = logging.getLogger("headrace.dev")
logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it tells how many files changed

DRAIN_S = 1.0
"""How long handlers may take to end before the silo starts again, in seconds."""
KILL_S = 10.0
"""A silo that has not stopped after this time, in seconds, is killed."""
RETRY_S = 2.0
"""Pause before a silo starts again whose fault may be outside of the project, such as a database without tables, in
seconds."""
LOOPBACK = "127.0.0.1"


def run_and_reload(config: Path, data: Path, host: str, grpc_port: int, http_port: int) -> int:
    """Serve the project in the working directory until a signal. Return the exit code.

    If the silo cannot start because of a file of the project, or ends by itself, the reason is logged, and the next
    change starts it again. For a reason outside of the files, it is also tried again every `RETRY_S`.

    Raises InvalidArgument for an option or variable that no change of a file can make right, and Busy if a port is
    taken.
    """
    with (
        _reserved_port(host, grpc_port, "--listen", "HOST:PORT") as grpc_reserved,
        _reserved_port(LOOPBACK, http_port, "--port", "PORT") as http_reserved,
    ):
        grpc, http = GrpcConfig(host=host, port=grpc_reserved), HttpConfig(host=LOOPBACK, port=http_reserved)
        if grpc.port == http.port:
            raise InvalidArgument(
                f"--listen and --port have the same port {http.port}: give another one to one of them"
            )
        silo = ReloadingSilo(config, data, grpc, http)
        check_variables(os.environ, silo.flags)
        log_to_stderr("info")
        _make_data_directory(data)
        asyncio.run(silo.run())
    return DONE


@contextmanager
def _reserved_port(host: str, port: int, option: str, value: str) -> Generator[int]:
    """Yield the port, or a free one for 0. It stays the same over restarts.

    On Linux, a socket that is bound and does not listen keeps the system from choosing the port for another program,
    also between restarts. The silo can bind the same port, because both set SO_REUSEADDR.

    Raises InvalidArgument if the silo can never listen at the address, Busy if another process does.
    """
    with _bind(host, port, option, value) as reservation:
        free: int = reservation.getsockname()[1]
        if sys.platform != "linux":  # elsewhere, the silo could not bind the port
            reservation.close()
        yield free


def _bind(host: str, port: int, option: str, value: str) -> socket.socket:
    """Return a socket that is bound to the address and does not listen. Raises InvalidArgument, Busy."""
    given = f"{option} {GrpcConfig(host=host).at(port) if value == 'HOST:PORT' else port}"
    if not is_loopback(host):
        raise InvalidArgument(
            f"{given}: not an address of this machine alone, and headrace dev has no TLS: write {LOOPBACK}:{port}, or "
            "serve other machines with headrace silo"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
        return bound
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise InvalidArgument(f"{given}: {error.strerror}: give another {value}") from None
    raise Busy(
        f"{host}:{port} is in use, perhaps by another `headrace dev`: stop that process, or give {option} {value}"
    )


def _make_data_directory(data: Path) -> None:
    """Create the directory, with a file that keeps it out of a Git repository."""
    open_data_directory(data)
    with suppress(FileExistsError), (data / ".gitignore").open("x") as file:
        file.write("*\n")


class ProjectFilter(DefaultFilter):
    """Lets changes of Python files and of the configuration through, but not those in environments and caches."""

    def __init__(self, config: Path) -> None:
        """`config` is an absolute path, in the folder of the project."""
        super().__init__()
        self._config = config

    def __call__(self, change: Change, path: str) -> bool:
        """The names of folders above the project do not count: it may be in a folder that is ignored itself."""
        inside = Path(path).relative_to(self._config.parent)
        return (inside.suffix == ".py" or path == str(self._config)) and super().__call__(change, str(inside))


class _SiloFault(NamedTuple):
    """The reason why a silo cannot start, or has ended by itself."""

    text: str
    may_pass: bool
    """The cause is outside of the files, for example a database: the silo starts again after `RETRY_S`."""


class ReloadingSilo:
    """The silo of a project. Call `run` once."""

    def __init__(self, config: Path, data: Path, grpc: GrpcConfig, http: HttpConfig) -> None:
        self._file = config.absolute()
        self._data = data.absolute()
        self._grpc = grpc
        self._http = http
        self._changed = asyncio.Event()
        self._changed_files: set[str] = set()
        self._stopping = asyncio.Event()
        self._worker: SiloWorker | None = None

    @property
    def flags(self) -> Mapping[str, Any]:
        """The options that the command line decides, whatever silo.toml and variables say."""
        return {
            "data": str(self._data),
            "grpc": {"host": self._grpc.host, "port": self._grpc.port},
            "http": {"host": self._http.host, "port": self._http.port},
        }

    async def run(self) -> None:
        """Serve until a signal. A second signal kills the silo."""
        handle_signals(lambda _: self._stopping.set(), self._kill)
        await first_of(self._watch(), self._serve_again_and_again(), name="headrace dev")

    async def _watch(self) -> NoReturn:
        folder = self._file.parent
        async for changes in watch_files(folder, watch_filter=ProjectFilter(self._file)):
            files = {path for _, path in changes}
            self._changed_files |= files
            names = sorted(str(Path(path).relative_to(folder)) for path in files)
            log.info("%s changed: the silo starts again", ", ".join(names))
            self._changed.set()
        raise AssertionError("the files are watched until the task is cancelled")

    async def _serve_again_and_again(self) -> None:
        last_fault: _SiloFault | None = None
        while not self._stopping.is_set():
            if self._changed.is_set():
                last_fault = None
                self._changed.clear()
            self._forget_compiled()
            fault = await self._serve()
            if fault is not None:
                if fault != last_fault:
                    log.error("%s", fault.text)
                    when = f", and is tried again every {RETRY_S:g} s until then" if fault.may_pass else ""
                    log.info("the silo starts again when a file changes%s", when)
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S if fault.may_pass else None):
                        await self._changed_or_stopping()
            last_fault = fault

    def _forget_compiled(self) -> None:
        """Delete compiled changed modules: Python takes a file that changed within the same second for the same one."""
        while self._changed_files:
            path = self._changed_files.pop()
            if path.endswith(".py"):
                with suppress(OSError):  # there is none, or its folder is read-only
                    Path(cache_from_source(path)).unlink()

    async def _changed_or_stopping(self) -> None:
        """Wait until a file changes, or until a signal stops the command."""
        await first_of(self._changed.wait(), self._stopping.wait(), name="headrace dev change")

    async def _serve(self) -> _SiloFault | None:
        """Run the silo until it is stopped, or ends by itself. Return the reason of the latter, else None."""
        try:
            config = self._load()
        except (InvalidArgument, OSError) as error:
            return _SiloFault(str(error), may_pass=False)
        self._worker = SiloWorker(config)
        async with BackgroundTasks() as background:
            background.start(self._stop_on_change(self._worker), "headrace dev stop")
            ended = await self._worker.run()
        if self._changed.is_set() or self._stopping.is_set():
            return None
        if not ended.reported.error:
            return _SiloFault(f"the silo ended: {ended.why}", may_pass=False)
        return _SiloFault(ended.why, may_pass=ended.code == FAILED)

    async def _stop_on_change(self, worker: SiloWorker) -> None:
        await self._changed_or_stopping()
        await worker.started.wait()
        worker.signal(signal.SIGTERM)
        await asyncio.sleep(KILL_S)
        log.warning("the silo has not stopped within %g s: it is killed", KILL_S)
        worker.signal(signal.SIGKILL)

    def _kill(self) -> None:
        if self._worker is not None:
            self._worker.signal(signal.SIGKILL)

    def _load(self) -> SiloConfig:
        """Return the configuration of the file, with the parts that are for development only.

        Raises InvalidArgument if it is wrong, OSError if it cannot be read.
        """
        loaded = load_config(self._file, os.environ, self.flags)
        config = msgspec.structs.replace(
            loaded,
            grpc=self._grpc,
            http=self._http,
            cluster=None,
            workers=None,
            drain_s=min(loaded.drain_s, DRAIN_S),
        )
        check(config)
        return config
