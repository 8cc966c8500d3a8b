"""A process that has the command line imported already, and forks for each call of it.

So the call is a process of its own, which need not wait for imports. Run as a script, it is that process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

IMPORTED = ("publish", "subscribe", "streams", "subscriptions", "deadletters", "queues", "cluster", "tokens", "silo")
MESSAGE = 1 << 20


class Forking:
    """Belongs to the process that made it."""

    def __init__(self, folder: Path) -> None:
        self._address = str(folder / "s")
        command = [sys.executable, "-P", __file__, self._address]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def run(
        self, arguments: Sequence[str], stdin: bytes, cwd: Path, env: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        """Call `headrace`, to its end: exit code, stdout, stderr."""
        pipes = [os.pipe() for _ in range(3)]
        (theirs_in, ours_in), (ours_out, theirs_out), (ours_err, theirs_err) = pipes
        request = json.dumps({"arguments": arguments, "cwd": str(cwd), "env": dict(env)}).encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout_s)
            connection.connect(self._address)
            socket.send_fds(connection, [request], [theirs_in, theirs_out, theirs_err])
            for fd in (theirs_in, theirs_out, theirs_err):
                os.close(fd)
            writing = threading.Thread(target=_write, args=(os.fdopen(ours_in, "wb"), stdin))
            got: dict[str, bytes] = {}
            files = {"out": os.fdopen(ours_out, "rb"), "err": os.fdopen(ours_err, "rb")}
            reading = [threading.Thread(target=_read, args=(file, got, name)) for name, file in files.items()]
            for thread in (writing, *reading):
                thread.start()
            code = int(connection.recv(16))
            for thread in (writing, *reading):
                thread.join(timeout_s)
        return code, got["out"], got["err"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


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
        import_module(f"headrace.silo.commands.{name}")
    import_module("headrace.silo.provider")
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
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.send(str(code).encode())
    os._exit(0)


def _become(request: Mapping[str, object], fds: Sequence[int]) -> NoReturn:
    from headrace.silo.cli import main  # noqa: PLC0415

    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(str(request["cwd"]))
    os.environ.clear()
    os.environ.update(request["env"])  # pyright: ignore[reportArgumentType, reportCallIssue, reportUnknownMemberType]
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    sys.argv = ["headrace", *request["arguments"]]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownMemberType]
    sys.exit(main())


if __name__ == "__main__":
    serve(sys.argv[1])
