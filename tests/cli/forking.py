"""A process that has the command line imported already, and forks for each call of it.

So the call is a process of its own, which need not wait for imports. Run as a script, it is that process."""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, NoReturn, Protocol

IMPORTED = (
    *(f"headrace.cli.commands.{name}" for name in (
        "publish", "subscribe", "streams", "subscriptions", "deadletters", "queues", "cluster", "tokens", "silo",
        "check", "repair", "backup", "restore",
    )),
    "headrace.cli.serving", "headrace.silo.checking", "headrace.silo.repair",
    "headrace.silo.provider", "headrace.silo.services.assembly", "headrace.server.grpc_server",
    "headrace.client.client", "headrace.adapters.log.adapter", "headrace.adapters.memory", "rich.console", "rich.table",
)  # fmt: skip
MESSAGE = 1 << 20
CONNECT_S = "TESTS_CONNECT_S"
"""Variable: how long the call tries to reach a silo, in seconds."""


class Process(Protocol):
    """The part of `subprocess.Popen[bytes]` that a forked process has, too."""

    pid: int
    returncode: int
    """Only once it has ended."""
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...
    def terminate(self) -> None: ...
    def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]: ...  # noqa: A002


class ForkedProcess:
    """A process that `Forking` started."""

    returncode: int

    def __init__(self, connection: socket.socket, ours: Sequence[int | None]) -> None:
        self._connection = connection
        self._ended: int | None = None
        self._lock = threading.Lock()
        self.pid = int(connection.recv(16))
        files = (None if fd is None else os.fdopen(fd, mode) for fd, mode in zip(ours, ("wb", "rb", "rb"), strict=True))
        self.stdin: IO[bytes] | None
        self.stdout: IO[bytes] | None
        self.stderr: IO[bytes] | None
        self.stdin, self.stdout, self.stderr = files

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self._ended is None:
                self._connection.settimeout(timeout)
                try:
                    self._ended = self.returncode = int(self._connection.recv(16))
                except (TimeoutError, BlockingIOError):
                    raise subprocess.TimeoutExpired("headrace", timeout or 0) from None
                self._connection.close()
            return self._ended

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:  # noqa: A002
        got: dict[str, bytes] = {}
        threads = [
            threading.Thread(target=_read, args=(file, got, name))
            for name, file in (("out", self.stdout), ("err", self.stderr))
            if file is not None and not file.closed
        ]
        if self.stdin is not None and not self.stdin.closed:
            threads.append(threading.Thread(target=_write, args=(self.stdin, input or b"")))
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        return got.get("out", b""), got.get("err", b"")


class Forking:
    """Belongs to the process that made it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-forking-")
        self._address = str(Path(self._folder.name, "s"))
        command = [sys.executable, "-P", __file__, self._address]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def start(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        script: str = "",
    ) -> ForkedProcess:
        """Call `headrace`, or run `script` as `python -c` does. The files are as those of `subprocess.Popen`."""
        ours: list[int | None] = []
        theirs: list[int] = []
        for number, file in enumerate((stdin, stdout, stderr)):
            mine = None
            if file is None:
                fd = os.dup(number)
            elif file == subprocess.DEVNULL:
                fd = os.open(os.devnull, os.O_RDWR)
            elif file == subprocess.STDOUT:
                fd = os.dup(theirs[1])
            elif file == subprocess.PIPE:
                reads, writes = os.pipe()
                fd, mine = (writes, reads) if number else (reads, writes)
            else:
                fd = os.dup(file)
            theirs.append(fd)
            ours.append(mine)
        call = {"arguments": arguments, "cwd": str(cwd), "env": dict(env), "script": script}
        request = json.dumps(call).encode()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self._address)
        socket.send_fds(connection, [request], theirs)
        for fd in theirs:
            os.close(fd)
        return ForkedProcess(connection, ours)

    def run(
        self,
        arguments: Sequence[str],
        stdin: bytes,
        cwd: Path,
        env: Mapping[str, str],
        timeout_s: float,
        script: str = "",
    ) -> tuple[int, bytes, bytes]:
        """Call `headrace`, or run `script`, to its end: exit code, stdout, stderr."""
        pipe = subprocess.PIPE
        process = self.start(arguments, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe, script=script)
        out, err = process.communicate(stdin, timeout_s)
        return process.wait(), out, err

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()


@cache
def forking() -> Forking:
    """The one of this process."""
    made = Forking()
    atexit.register(made.close)
    return made


def _write(file: IO[bytes], data: bytes) -> None:
    try:
        with file:
            file.write(data)
    except BrokenPipeError:
        pass  # it does not read that far


def _read(file: IO[bytes], got: dict[str, bytes], name: str) -> None:
    with file:
        got[name] = file.read()


# ---- the process -----------------------------------------------------------------------------------------------------


def serve(address: str) -> None:
    from importlib import import_module  # noqa: PLC0415

    for name in IMPORTED:
        import_module(name)
    import_module("headrace.balancer.mapper").StreamQueueMapper(8)  # the ring of most providers is remembered
    # Else a call, as it ends, walks over all objects of this process, and copies their memory.
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        print("ready", flush=True)
        while True:
            connection = listener.accept()[0]
            if not os.fork():
                listener.close()
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    encoded, fds, _, _ = socket.recv_fds(connection, MESSAGE, 3)
    pid = os.fork()
    if not pid:
        connection.close()
        _become(json.loads(encoded), fds)
    for fd in fds:
        os.close(fd)
    connection.send(str(pid).encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):  # the one that started it is gone
        connection.send(str(code).encode())
    os._exit(0)


def _become(request: Mapping[str, object], fds: Sequence[int]) -> NoReturn:
    from headrace.cli.commands import options  # noqa: PLC0415
    from headrace.cli.main import main  # noqa: PLC0415

    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(str(request["cwd"]))
    os.environ.clear()
    os.environ.update(request["env"])  # pyright: ignore[reportArgumentType, reportCallIssue, reportUnknownMemberType]
    options.CONNECT_S = float(os.environ.pop(CONNECT_S, options.CONNECT_S))
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    if script := request["script"]:
        sys.path.insert(0, "")
        sys.argv = ["-c", *request["arguments"]]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownMemberType]
        exec(compile(str(script), "script", "exec", dont_inherit=True), {"__name__": "__main__"})
        sys.exit()
    sys.argv = ["headrace", *request["arguments"]]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownMemberType]
    sys.exit(main())


if __name__ == "__main__":
    serve(sys.argv[1])
