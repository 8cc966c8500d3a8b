"""The checks of `headrace doctor`. `judge_...` judges facts that it is given; `..._findings` gather them."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal, NamedTuple

from ..store.datadir import MARKER, check_marker_kept
from ..streams.errors import DataDirectoryError
from ..streams.private_files import WIDER
from ..streams.wording import counted

Verdict = Literal["ok", "warn", "bad"]


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    verdict: Verdict
    text: str
    """What was found."""
    remedy: str = ""
    """What to do, unless the verdict is ok."""


PORTS = {"gRPC": 9465, "dashboard": 9464}
"""The ports of `headrace dev`, and of the examples."""
EXTRAS = ("kafka", "otel", "postgres", "redis", "spark")
LEAST_FILES = 1024
"""Open files that a silo should be allowed to have: it needs one for each connection."""
LEAST_BYTES, FEW_BYTES = 100 << 20, 2 << 30
"""Free space below which publishing will soon fail, and below which it is time to act."""
FUTURE_S = 60.0
"""A file may be so many seconds newer than the clock, because file systems round."""
SHARED = re.compile(
    r"nfs|cifs|smb|9p|afs|ceph|gluster|lustre|gpfs|ocfs|gfs2|sshfs|davfs|virtiofs|vboxsf|fuse\.", re.ASCII
)
"""File systems over a network, or of another machine: their locks and memory maps are not those of a local disk."""
UNSYNCHRONISED = 5
"""The state of the kernel's clock that nothing sets: TIME_ERROR of adjtimex."""


def judge_python(implementation: str, numbers: tuple[int, int]) -> Finding:
    found = f"{implementation} {numbers[0]}.{numbers[1]}"
    if implementation != "CPython":
        return Finding("python", "warn", found, "headrace is tested on CPython: use it")
    return Finding("python", "ok", found)


def judge_packages(required: Iterable[str], installed: Callable[[str], str | None]) -> Finding:
    """Judge requirements such as `sqlalchemy[asyncio]>=2.0.36` by the versions of the installed packages."""
    wrong: list[str] = []
    count = 0
    for requirement in required:
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?(?:.*?>=([\d.]+))?", requirement)
        assert match is not None
        count += 1
        name, least = match[1], match[2]
        found = installed(name)
        if found is None:
            wrong.append(f"{name} is missing")
        elif least is not None and _numbers(found) < _numbers(least):
            wrong.append(f"{name} is {found}, older than {least}")
    if wrong:
        return Finding("packages", "bad", "; ".join(wrong), "run pip install --upgrade headrace")
    return Finding("packages", "ok", f"{counted(count, 'package')} as required")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def judge_extras(packages: Mapping[str, Sequence[str]], installed: Callable[[str], str | None]) -> Finding:
    """Judge the packages of each extra: all of them are installed, or none."""
    whole = [extra for extra, names in packages.items() if all(installed(name) for name in names)]
    partly = [extra for extra, names in packages.items() if extra not in whole and any(map(installed, names))]
    text = f"installed: {', '.join(whole) or 'none'}"
    absent = [extra for extra in packages if extra not in whole]
    if absent:
        text += f"; optional: pip install 'headrace[{','.join(absent)}]'"
    if partly:
        return Finding(
            "extras",
            "warn",
            f"{text}; {', '.join(partly)} only in part",
            f"run pip install 'headrace[{','.join(partly)}]' if you use it",
        )
    return Finding("extras", "ok", text)


def judge_files(limit: int) -> Finding:
    """Judge the limit of open files. A negative one means that there is none."""
    if 0 <= limit < LEAST_FILES:
        remedy = f"raise it: `ulimit -n 65536`, or LimitNOFILE=65536 of systemd; a silo should have {LEAST_FILES:,}"
        return Finding("open files", "warn", f"at most {limit:,}", remedy)
    return Finding("open files", "ok", "no limit" if limit < 0 else f"at most {limit:,}")


def judge_clock(state: int | None) -> Finding:
    """Judge the state that adjtimex returns. None: it is not known on this system."""
    if state is None:
        return Finding("clock", "ok", "whether it is synchronised is not known on this system")
    if state == UNSYNCHRONISED:
        remedy = "run chrony or systemd-timesyncd: times of events, retention and delays follow the clock"
        return Finding("clock", "warn", "not synchronised", remedy)
    return Finding("clock", "ok", "synchronised")


def judge_port(use: str, port: int, free: bool) -> Finding:
    if free:
        return Finding(f"port {port}", "ok", f"free, for {use}")
    option = f"--listen 127.0.0.1:{port + 10}" if use == "gRPC" else f"--port {port + 10}"
    remedy = f"give `headrace dev` another one with {option}, unless a silo has it"
    return Finding(f"port {port}", "warn", f"in use, so not free for {use}", remedy)


def judge_filesystem(kind: str | None, place: str) -> Finding:
    if kind is None:
        return Finding("disk", "warn", f"the file system of {place} is not known", "check that it is a local disk")
    if SHARED.match(kind):
        remedy = "name a directory on a local disk: SQLite's locks and the log's memory map need one"
        return Finding("disk", "bad", f"{place} is on {kind}, which is no local disk", remedy)
    if kind in ("tmpfs", "ramfs"):
        return Finding("disk", "warn", f"{place} is on {kind}, in memory", "name a directory on a disk to keep events")
    return Finding("disk", "ok", f"{place} is on {kind}")


def judge_space(free: int, inodes: int | None) -> Finding:
    """Judge free bytes and free inodes. None: the file system has no number of them."""
    text = f"{free / 1e9:,.1f} GB free"
    remedy = "free some, or bound the queues with retain_bytes: docs/configuration.md#retention-how-to-bound-the-disk"
    if inodes == 0:
        return Finding("space", "bad", f"{text}, but no inode", "delete files on this disk")
    if free < LEAST_BYTES:
        return Finding("space", "bad", text, remedy)
    return Finding("space", "warn", text, remedy) if free < FEW_BYTES else Finding("space", "ok", text)


def judge_permissions(place: str, mode: int, owner: int, user: int) -> Finding:
    """Judge mode and owner of a data directory, for this user."""
    if user not in (owner, 0):
        return Finding("permissions", "bad", f"{place} is of user {owner}, not of {user}", "run as its owner")
    if mode & WIDER:
        remedy = f"run chmod 700 {shlex.quote(place)}"
        return Finding("permissions", "bad", f"other users can use {place}: its mode is {mode:04o}", remedy)
    return Finding("permissions", "ok", f"mode {mode:04o}, only for its owner")


def judge_times(newest: float, now: float) -> Finding:
    """Judge whether the newest file is from the future."""
    if newest - now > FUTURE_S:
        text = f"the newest file is {newest - now:,.0f} s in the future, so the clock was set back"
        return Finding("times", "warn", text, "set the clock: events keep their later times until it has caught up")
    return Finding("times", "ok", "no file is from the future")


def local_findings() -> list[Finding]:
    """Check this machine and this installation."""
    extras = {extra: _required(extra) for extra in EXTRAS}
    return [
        Finding("headrace", "ok", version("headrace")),
        judge_python(platform.python_implementation(), sys.version_info[:2]),
        judge_packages(_required(None), _installed),
        judge_extras(extras, lambda name: _installed(re.split(r"[\[<>=~!; ]", name)[0])),
        judge_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        judge_clock(_clock_state()),
    ]


def port_findings() -> list[Finding]:
    """Check the ports that `headrace dev` takes."""
    return [judge_port(use, port, _is_free(port)) for use, port in PORTS.items()]


def data_findings(data: Path) -> list[Finding]:
    """Check a data directory, or the place for a new one. Nothing is written."""
    existing = next(parent for parent in (data.absolute(), *data.absolute().parents) if parent.exists())
    found = [judge_filesystem(_filesystem(existing), str(existing)), _space(existing), _kind(data)]
    if found[-1].verdict != "ok" or existing != data.absolute():
        return found
    status = data.stat()
    found.append(judge_permissions(str(data), stat.S_IMODE(status.st_mode), status.st_uid, os.geteuid()))
    if found[-1].verdict == "ok":
        found.append(judge_times(max(map(_changed_at, (data, *data.iterdir()))), time.time()))
    return found


def _changed_at(file: Path) -> float:
    """Return when a file was changed; 0 if it is gone by now."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _kind(data: Path) -> Finding:
    try:
        check_marker_kept(data)
        if not data.exists():
            return Finding("data", "ok", f"{data} does not exist yet: the first use creates it")
        if (data / MARKER).exists():
            return Finding("data", "ok", f"{data} is a data directory")
        if not data.is_dir() or any(data.iterdir()):
            return Finding("data", "bad", f"{data} is not empty and not made by headrace", "name another directory")
        return Finding("data", "ok", f"{data} is empty: the first use makes it a data directory")
    except DataDirectoryError as error:
        return Finding("data", "bad", error.problem, "see docs/damage.md")
    except OSError as error:
        return Finding("data", "bad", f"{data}: {error.strerror}", "name another directory, or run as its owner")


def _space(place: Path) -> Finding:
    status = os.statvfs(place)
    return judge_space(shutil.disk_usage(place).free, status.f_favail if status.f_files else None)


def _filesystem(place: Path) -> str | None:
    """Return the kind of the file system that has a path. None: the system does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    return filesystem_of(str(place.resolve()), lines)


def filesystem_of(path: str, mounts: Iterable[str]) -> str | None:
    """Return the kind of the file system of the innermost mount, of lines as in /proc/self/mountinfo."""
    found, longest = None, -1
    for line in mounts:
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:  # of two mounts on one point, the later one hides the other
            found, longest = rest.split()[0], len(point)
    return found


def _required(extra: str | None) -> list[str]:
    marked = [requirement.partition(";") for requirement in requires("headrace") or ()]
    if extra is None:
        return [name for name, _, marker in marked if "extra" not in marker]
    return [name for name, _, marker in marked if re.search(rf"""extra == ['"]{extra}['"]""", marker)]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _clock_state() -> int | None:
    if sys.platform != "linux":
        return None
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # zeros: it only reads
    return state if state >= 0 else None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True
