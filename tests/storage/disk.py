"""A model of a disk with files and directories, for all states in which a power cut may leave it.

The rules are those of POSIX, which every file system keeps and most better: a sync of a file makes its content durable,
and only its content. A sync of a directory makes the names in it durable. Everything else that was changed since may be
there or not, each sector for itself. A rename within the disk happens wholly or not at all. Writes to the same sector
keep their order, because they are made to one page in memory.
"""

import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.storage.recording import Step

SECTOR = 512
PAGE = 4096


class Change(NamedTuple):
    """A change of a file that is not durable: data at an offset, or a new size."""

    call: int
    data: bytes | None
    offset: int


@dataclass
class Node:
    """A file or a directory."""

    directory: bool
    fifo: bool = False
    content: bytearray = field(default_factory=bytearray)
    """Durable."""
    pending: list[Change] = field(default_factory=list[Change])
    mapped: bool = False
    """The process writes to it through memory, which is not recorded: after a power cut anything is in it."""
    names: dict[str, "Node"] = field(default_factory=dict[str, "Node"])
    """Durable."""
    renamed: list[tuple[int, str, "Node | None"]] = field(default_factory=list[tuple[int, str, "Node | None"]])
    """Pending changes of names: the call, the name, and the file that it names now."""

    def now(self) -> dict[str, "Node"]:
        """The names as the process sees them."""
        return _named(self.names, self.renamed)


class Kept(NamedTuple):
    """How much of the pending data survives a power cut."""

    share: float
    """Probability that a change is kept."""
    tear: int
    """The unit that is kept or lost, in bytes; 0: each write whole."""
    prefix: int | None = None
    """Nothing of this call, and of those after it, is kept."""
    without: int | None = None
    """Nothing of this call is kept."""
    by_file: bool = False
    """Of a file all is kept, or nothing."""


class Disk:
    """Follows a recording, and builds images of the disk after a power cut at the present step."""

    def __init__(self) -> None:
        self.root = Node(directory=True)
        self.writes = self.syncs = 0
        self._syncing: dict[int, tuple[Node, frozenset[int]]] = {}
        self._running: set[int] = set()

    def apply(self, step: Step) -> None:
        if step.begins:
            self._begin(step)
        if step.ends:
            self._end(step)

    def _begin(self, step: Step) -> None:
        if step.kind == "sync":
            self.syncs += 1
            node = self.node(step.path)
            pending = node.renamed if node.directory else node.pending
            # Changes that are still on their way are not part of it.
            self._syncing[step.call] = node, frozenset({change[0] for change in pending} - self._running)
            return
        self._running.add(step.call)
        if step.kind in ("write", "size"):
            node = self.node(step.path)
            if node.fifo:
                return
            self.writes += 1
            data = step.data if step.kind == "write" else None
            node.pending.append(Change(step.call, data, step.offset))
        elif step.kind == "mapped":
            self.node(step.path).mapped = True
        elif step.kind != "note":
            self._rename(step)

    def _rename(self, step: Step) -> None:
        parent, name = self._parent(step.path)
        there = parent.now().get(name)
        if step.kind in ("create", "fifo", "mkdir"):
            if there is None:
                new = Node(directory=step.kind == "mkdir", fifo=step.kind == "fifo")
                parent.renamed.append((step.call, name, new))
            return
        assert there is not None, step.path
        if step.kind in ("link", "rename"):
            other, new = self._parent(step.other)
            other.renamed.append((step.call, new, there))
        if step.kind in ("unlink", "rename"):
            parent.renamed.append((step.call, name, None))

    def _end(self, step: Step) -> None:
        self._running.discard(step.call)
        if step.kind == "sync":
            node, covered = self._syncing.pop(step.call)
            if node.directory:
                node.names = _named(node.names, [change for change in node.renamed if change[0] in covered])
                node.renamed = [change for change in node.renamed if change[0] not in covered]
            else:
                _write(node.content, [change for change in node.pending if change.call in covered])
                node.pending = [change for change in node.pending if change.call not in covered]
        elif step.kind == "write" and step.durable:
            # The kernel writes whole pages: what else was written to them before is durable, too.
            node = self.node(step.path)
            first, last = step.offset // PAGE, (step.offset + len(step.data) - 1) // PAGE
            durable = [c for c in node.pending if c.call <= step.call and _touches(c, first, last)]
            _write(node.content, durable)
            node.pending = [change for change in node.pending if change not in durable]

    def node(self, path: str) -> Node:
        """The file or directory that the process knows by a path."""
        node = self.root
        for name in Path(path).parts:
            node = node.now()[name]
        return node

    def _parent(self, path: str) -> tuple[Node, str]:
        at = Path(path)
        return self.node(str(at.parent)), at.name

    def pending(self) -> list[int]:
        """The calls of which something is not durable, in order."""
        calls: set[int] = set()
        for node in _nodes(self.root):
            calls |= {change.call for change in node.pending} | {call for call, *_ in node.renamed}
        return sorted(calls)

    def files(self) -> Mapping[str, bytes]:
        """The content of all files as the process sees them."""
        found: dict[str, bytes] = {}
        _collect(self.root, "", found)
        return found

    def build(self, target: Path, rng: random.Random, kept: Kept, stale: Mapping[str, bytes]) -> None:
        """Write an image of the disk after a power cut into a new directory. `stale` has contents of mapped files."""
        names: dict[int, bool] = {}

        def keeps_name(call: int) -> bool:
            if (kept.prefix is not None and call >= kept.prefix) or call == kept.without:
                return False
            return names.setdefault(call, rng.random() < kept.share)

        self._build(self.root, target, "", rng, kept, stale, keeps_name)

    def _build(
        self,
        node: Node,
        target: Path,
        path: str,
        rng: random.Random,
        kept: Kept,
        stale: Mapping[str, bytes],
        keeps_name: Callable[[int], bool],
    ) -> None:
        target.mkdir(mode=0o700)
        names = _named(node.names, [change for change in node.renamed if keeps_name(change[0])])
        for name, child in names.items():
            below = f"{path}/{name}".lstrip("/")
            if child.directory:
                self._build(child, target / name, below, rng, kept, stale, keeps_name)
            elif child.fifo:
                os.mkfifo(target / name)
            elif child.mapped:
                (target / name).write_bytes(_anything(rng, stale.get(below, b""), len(child.content)))
            else:
                share = round(rng.random()) if kept.by_file else kept.share
                (target / name).write_bytes(_left(child, rng, kept._replace(share=share)))


def _named(names: Mapping[str, Node], changes: Iterable[tuple[int, str, Node | None]]) -> dict[str, Node]:
    found = dict(names)
    for _, name, node in changes:
        if node is None:
            found.pop(name, None)
        else:
            found[name] = node
    return found


def _nodes(node: Node) -> Iterable[Node]:
    yield node
    for child in node.now().values():
        yield from _nodes(child)


def _collect(node: Node, path: str, found: dict[str, bytes]) -> None:
    for name, child in node.now().items():
        below = f"{path}/{name}".lstrip("/")
        if child.directory:
            _collect(child, below, found)
        elif not child.fifo:
            content = bytearray(child.content)
            _write(content, child.pending)
            found[below] = bytes(content)


def _touches(change: Change, first: int, last: int) -> bool:
    if change.data is None:
        return True
    return change.offset // PAGE <= last and (change.offset + len(change.data) - 1) // PAGE >= first


def _write(content: bytearray, changes: Sequence[Change]) -> None:
    for change in changes:
        if change.data is None:
            _resize(content, change.offset)
        else:
            end = change.offset + len(change.data)
            if len(content) < end:
                _resize(content, end)
            content[change.offset : end] = change.data


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _left(node: Node, rng: random.Random, kept: Kept) -> bytes:
    """A file after the power cut. It may have grown although the data that made it grow is lost."""
    content = bytearray(node.content)
    grows = rng.random() < 0.5
    for change in node.pending:
        if (kept.prefix is not None and change.call > kept.prefix) or change.call == kept.without:
            continue
        # The call at which a prefix ends is torn.
        share, tear = (0.5, SECTOR) if change.call == kept.prefix else (kept.share, kept.tear)
        if change.data is None:
            if rng.random() < share:
                _resize(content, change.offset)
            continue
        if grows and (end := change.offset + len(change.data)) > len(content):
            _resize(content, end)
        _write(content, _parts(change, rng, share, tear))
    return bytes(content)


def _parts(change: Change, rng: random.Random, share: float, tear: int) -> list[Change]:
    assert change.data is not None
    if not tear:
        return [change] if rng.random() < share else []
    parts: list[Change] = []
    at, end = change.offset, change.offset + len(change.data)
    while at < end:
        stop = min((at // tear + 1) * tear, end)
        if share >= 1 or rng.random() < share:
            parts.append(Change(change.call, change.data[at - change.offset : stop - change.offset], at))
        at = stop
    return parts


def _anything(rng: random.Random, stale: bytes, size: int) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return b""
    if kind == 1:
        return bytes(max(size, len(stale)))
    return stale if kind == 2 else rng.randbytes(max(size, len(stale)))
