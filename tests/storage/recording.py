"""Record each change that a process makes to the files below a directory, and each sync, by strace.

A recording is a list of steps in the order in which the kernel saw them. A call that takes time is two steps, its begin
and its end: a write may be on the disk from its begin on, and a sync promises only at its end, and only for the writes
that ended before its begin.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.servers import find_program

_CALLS = (
    "openat,open,creat,close,lseek,write,pwrite64,writev,pwritev,pwritev2,ftruncate,truncate,fallocate,rename,renameat,"
    "renameat2,unlink,unlinkat,link,linkat,symlink,symlinkat,mkdir,mkdirat,rmdir,mknod,mknodat,fsync,fdatasync,msync,"
    "sync_file_range,sync,syncfs,mmap,dup,dup2,dup3,sendfile,copy_file_range,io_uring_setup"
)
_LINE = re.compile(rb"(\d+) +(\w+)\((.*)\) += +(-?\d+|0x[0-9a-f]+)(?:<.*>)?(?: .*)?$", re.DOTALL)
_CUT_SHORT = re.compile(rb"(\d+) +(pwrite64)\((.*, (\d+), \d+)\) += \?$", re.DOTALL)
"""The process was killed during this call. The kernel finishes it nevertheless: the next process finds the data."""
_BEGUN = re.compile(rb"(\d+) +(\w+)\((.*) <unfinished \.\.\.>$", re.DOTALL)
_RESUMED = re.compile(rb"(\d+) +<\.\.\. (\w+) resumed>(.*)$", re.DOTALL)
_STRING = re.compile(rb'"((?:\\x[0-9a-f]{2})*)"')
_PATH_OF_FD = re.compile(rb"^(\d+)<([^>]*)>(?!\(deleted\))")
_ENDED = re.compile(rb"\d+ \+\+\+ ")


class Step(NamedTuple):
    """One step. `call` is the number of the call; the two steps of a call have the same one."""

    call: int
    begins: bool
    ends: bool
    kind: str
    """write, size, create, fifo, mkdir, link, rename, unlink, sync, mapped, or note (a line of the journal)."""
    path: str
    """Relative to the recorded directory; "" is that directory itself."""
    data: bytes = b""
    offset: int = 0
    """Offset of the data; for `size`, the new size."""
    other: str = ""
    """The new name of a link or rename."""
    durable: bool = False
    """A write with O_SYNC or O_DSYNC: durable at its end."""


class _Call(NamedTuple):
    thread: int
    name: str
    arguments: bytes
    result: int


class Unrecorded(Exception):
    """The process changed a file in a way that a recording cannot repeat."""


def record(command: Sequence[str], output: Path, *, environment: Mapping[str, str] | None = None) -> int:
    """Run a command, and write its system calls to `output`. Return its exit code; negative for a signal.

    Raises NotAvailable if strace is missing and must not be installed.
    """
    strace = find_program("strace", debian_package="strace")
    options = ("-f", "-qq", "-y", "-xx", "-s", "100000000", "--seccomp-bpf", "-e", "signal=none", "-e")
    return subprocess.run(
        (strace, *options, f"trace={_CALLS}", "-o", os.fspath(output), *command),
        env={**os.environ, **(environment or {})},
        check=False,
    ).returncode


def steps_of(traces: Sequence[Path], root: Path, journal: Path) -> list[Step]:
    """The steps of one process after the other, below `root`. What was written to `journal` becomes notes."""
    steps: list[Step] = []
    for trace in traces:
        steps += _Reader(root, journal, len(steps)).read(trace)
    return steps


class _Reader:
    """Reads what strace wrote about one process."""

    def __init__(self, root: Path, journal: Path, first_call: int) -> None:
        self._root = os.fsencode(root.resolve())
        self._journal = os.fsencode(journal.resolve())
        self._number = first_call
        self._positions: dict[int, int] = {}
        self._flags: dict[int, bytes] = {}
        self._sizes: dict[str, int] = {}

    def read(self, trace: Path) -> Iterator[Step]:
        lines = [line for line in trace.read_bytes().split(b"\n") if line and not _ENDED.match(line)]
        results = _results(lines)
        open_calls: dict[int, list[Step]] = {}
        for number, line in enumerate(lines):
            if begun := _BEGUN.match(line):
                call = results.get(number)
                steps = [] if call is None else list(self._steps(call))
                open_calls[int(begun[1])] = steps
                yield from (step._replace(ends=False) for step in steps)
            elif resumed := _RESUMED.match(line):
                yield from (step._replace(begins=False) for step in open_calls.pop(int(resumed[1]), ()))
            elif call := _whole(line):
                yield from self._steps(call)

    def _steps(self, call: _Call) -> Iterator[Step]:
        if call.result < 0:
            return
        handler = _HANDLERS.get(call.name)
        if handler is not None:
            for step in handler(self, call):
                self._number += 1
                yield step._replace(call=self._number)

    def _below(self, path: bytes) -> str | None:
        path = os.path.normpath(path)
        if path == self._root:
            return ""
        start = self._root + b"/"
        return os.fsdecode(path[len(start) :]) if path.startswith(start) else None

    def _fd(self, call: _Call) -> tuple[int, bytes]:
        found = _PATH_OF_FD.match(call.arguments)
        return (int(found[1]), _text(found[2])) if found else (-1, b"")

    def _paths(self, call: _Call) -> list[bytes]:
        """The path arguments, made absolute by the directory before them."""
        found: list[bytes] = []
        for match in _STRING.finditer(call.arguments):
            path = _text(match[1])
            if not path.startswith(b"/"):
                base = re.search(rb"<((?:\\x[0-9a-f]{2})+)>, $", call.arguments[: match.start()])
                path = (_text(base[1]) if base else os.fsencode(Path.cwd())) + b"/" + path
            found.append(path)
        return found

    def open(self, call: _Call) -> Iterator[Step]:
        flags = call.arguments.split(b", ", 2)[2] if call.name == "openat" else call.arguments
        fd = call.result
        self._flags[fd] = flags
        self._positions[fd] = 0
        path = self._below(self._paths(call)[0])
        if path is not None and b"O_CREAT" in flags:
            yield _step("create", path)
        if path is not None and b"O_TRUNC" in flags:
            self._sizes[path] = 0
            yield _step("size", path)

    def seek(self, call: _Call) -> Iterator[Step]:
        self._positions[self._fd(call)[0]] = call.result
        yield from ()

    def write(self, call: _Call) -> Iterator[Step]:
        fd, name = self._fd(call)
        if name != self._journal and self._below(name) is None:
            return
        # Escaped text has no quotes of its own.
        data = b"".join(map(_text, call.arguments.split(b'"')[1::2]))[: call.result]
        if name == self._journal:
            yield Step(0, True, True, "note", "", data)
        path = self._below(name)
        if path is None:
            return
        if call.name in ("pwrite64", "pwritev", "pwritev2"):
            offset = int(call.arguments.rsplit(b", ", 2 if call.name == "pwritev2" else 1)[1])
        else:
            offset = self._sizes.get(path, 0) if b"O_APPEND" in self._flags[fd] else self._positions[fd]
            self._positions[fd] = offset + len(data)
        self._sizes[path] = max(self._sizes.get(path, 0), offset + len(data))
        durable = any(flag in self._flags[fd] for flag in (b"O_SYNC", b"O_DSYNC"))
        yield _step("write", path, data, offset)._replace(durable=durable)

    def resize(self, call: _Call) -> Iterator[Step]:
        path = self._below(self._fd(call)[1] if call.name != "truncate" else self._paths(call)[0])
        if path is None:
            return
        numbers = [int(number) for number in re.findall(rb", (\d+)", call.arguments)]
        if call.name == "fallocate":
            if numbers[0] != 0:
                raise Unrecorded(f"fallocate with a mode: {path}")
            size = max(self._sizes.get(path, 0), numbers[1] + numbers[2])
        else:
            size = numbers[0]
        self._sizes[path] = size
        yield _step("size", path, offset=size)

    def sync(self, call: _Call) -> Iterator[Step]:
        path = self._below(self._fd(call)[1])
        if path is not None:
            yield _step("sync", path)

    def name(self, call: _Call) -> Iterator[Step]:
        paths = [self._below(path) for path in self._paths(call)]
        if any(path is not None for path in paths):
            kind = {
                "mkdirat": "mkdir",
                "unlinkat": "unlink",
                "rmdir": "unlink",
                "linkat": "link",
                "mknod": "fifo",
                "mknodat": "fifo",
            }.get(call.name, call.name.rstrip("at2") if call.name.startswith("rename") else call.name)
            if None in paths:
                raise Unrecorded(f"{call.name} across the border of the recorded directory")
            first, *others = [path or "" for path in paths]
            yield _step(kind, first)._replace(other=others[0] if others else "")

    def map(self, call: _Call) -> Iterator[Step]:
        found = re.search(rb"MAP_SHARED.*, (\d+)<([^>]*)>", call.arguments)
        path = self._below(_text(found[2])) if found else None
        if path is not None and b"PROT_WRITE" in call.arguments:
            yield _step("mapped", path)

    def descriptor(self, call: _Call) -> Iterator[Step]:
        fd, name = self._fd(call)
        if self._below(name) is not None:
            self._flags[call.result] = self._flags.get(fd, b"")
            self._positions[call.result] = self._positions.get(fd, 0)
        yield from ()

    def refuse(self, call: _Call) -> Iterator[Step]:
        if call.name == "io_uring_setup" or any(
            self._below(_text(found)) is not None for found in re.findall(rb"<((?:\\x[0-9a-f]{2})+)>", call.arguments)
        ):
            raise Unrecorded(f"{call.name} is not recorded: {call.arguments[:200]!r}")
        yield from ()


_HANDLERS: Mapping[str, Callable[[_Reader, _Call], Iterator[Step]]] = {
    **dict.fromkeys(("open", "openat", "creat"), _Reader.open),
    "lseek": _Reader.seek,
    **dict.fromkeys(("write", "pwrite64", "writev", "pwritev", "pwritev2"), _Reader.write),
    **dict.fromkeys(("ftruncate", "truncate", "fallocate"), _Reader.resize),
    **dict.fromkeys(("fsync", "fdatasync"), _Reader.sync),
    **dict.fromkeys(
        (
            "rename",
            "renameat",
            "renameat2",
            "unlink",
            "unlinkat",
            "link",
            "linkat",
            "mkdir",
            "mkdirat",
            "rmdir",
            "mknod",
            "mknodat",
        ),
        _Reader.name,
    ),
    "mmap": _Reader.map,
    **dict.fromkeys(("dup", "dup2", "dup3"), _Reader.descriptor),
    **dict.fromkeys(
        ("msync", "sync_file_range", "sendfile", "copy_file_range", "symlink", "symlinkat", "io_uring_setup"),
        _Reader.refuse,
    ),
}


def _step(kind: str, path: str, data: bytes = b"", offset: int = 0) -> Step:
    return Step(0, True, True, kind, path, data, offset)


def _text(escaped: bytes) -> bytes:
    return bytes.fromhex(escaped.replace(b"\\x", b"").decode()) if escaped.startswith(b"\\x") else escaped


def _results(lines: Sequence[bytes]) -> dict[int, _Call]:
    """The whole calls of the lines that only begin one, by the number of the line."""
    found: dict[int, _Call] = {}
    begun: dict[int, tuple[int, bytes, bytes]] = {}
    for number, line in enumerate(lines):
        if match := _BEGUN.match(line):
            begun[int(match[1])] = number, match[2], match[3]
        elif match := _RESUMED.match(line):
            first, name, arguments = begun.pop(int(match[1]))
            whole = _whole(match[1] + b" " + name + b"(" + arguments + match[3])
            if whole is not None:  # other calls that the end of the process cut short have no result
                found[first] = whole
    return found


def _whole(line: bytes) -> _Call | None:
    match = _LINE.match(line) or _CUT_SHORT.match(line)
    return None if match is None else _Call(int(match[1]), match[2].decode(), match[3], int(match[4], 0))
