"""The notes that the silos of a cluster write while they run, and checks of all notes together.

Times are those of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

GOT, SAVED = "got", "saved"
Place = tuple[int, int]
"""Offset and index, as in a token."""


class Note(NamedTuple):
    """A line. GOT: a handler was called with events. SAVED: the store took a checkpoint, under the queue's lease."""

    began_ns: int
    ended_ns: int
    what: str
    silo: str
    subscription: str
    queue: int
    epoch: int
    """Of the lease; 0 where the silo has none."""
    stream: str = ""
    numbers: Sequence[int] = ()
    places: Sequence[Place] = ()
    next_offset: int = 0
    behind: Mapping[str, Place] = {}


class Notebook:
    """A file that survives its writer's kill."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)

    def write(self, *notes: Note) -> None:
        os.write(self._file, b"".join(msgspec.json.encode(note) + b"\n" for note in notes))


class Tail:
    """What was written to a file since it was asked last, in whole lines: the last one may be cut off by a kill."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def lines(self) -> Sequence[bytes]:
        if not self._path.exists():
            return ()
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + 1 if whole else 0
        return whole.splitlines()


class Notes:
    """All notes of some files. A writer that was killed amid a line has spoilt the next one, too: neither counts."""

    def __init__(self) -> None:
        self._tails: dict[Path, Tail] = {}
        self._notes: list[Note] = []

    def read(self, paths: Iterable[Path]) -> Sequence[Note]:
        """By when they began."""
        for path in paths:
            for line in self._tails.setdefault(path, Tail(path)).lines():
                with suppress(msgspec.DecodeError):
                    self._notes.append(msgspec.json.decode(line, type=Note))
        self._notes.sort(key=lambda note: note.began_ns)
        return self._notes


def now_ns() -> int:
    return time.monotonic_ns()


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_owners(notes: Sequence[Note]) -> None:
    """Each lease belongs to one silo. Once a handler was called or a checkpoint saved under a newer lease of a queue,
    none is under an older one: only the owner serves a queue."""
    owners: dict[tuple[int, int], str] = {}
    for note in notes:
        assert note.epoch, f"{note} without a lease"
        assert owners.setdefault((note.queue, note.epoch), note.silo) == note.silo, f"{note}: {owners}"
    _check_epochs([note for note in notes if note.what == GOT])
    _check_epochs([note for note in notes if note.what == SAVED])


def _check_epochs(notes: Sequence[Note]) -> None:
    """What began after something else had ended has no older epoch."""
    newest: dict[int, Note] = {}
    for at_ns, is_end, note in sorted(_both_ends(notes), key=lambda end: end[:2]):
        newer = newest.get(note.queue)
        if is_end:
            if newer is None or newer.epoch < note.epoch:
                newest[note.queue] = note
        else:
            assert newer is None or newer.epoch <= note.epoch, f"at {at_ns}: {note} came after {newer}"


def _both_ends(notes: Sequence[Note]) -> Iterable[tuple[int, bool, Note]]:
    for note in notes:
        yield note.began_ns, False, note
        yield note.ended_ns, True, note


def check_saved_stays_done(notes: Sequence[Note], subscription: str) -> None:
    """No handler got an event that is done by a checkpoint which the store had accepted before."""
    latest: dict[int, Note] = {}
    of_it = [note for note in notes if note.subscription == subscription]
    times = [(note.ended_ns if note.what == SAVED else note.began_ns, note) for note in of_it]
    for _, note in sorted(times, key=lambda timed: timed[0]):
        if note.what == SAVED:
            latest[note.queue] = note
        elif note.queue in latest:
            for number, place in zip(note.numbers, note.places, strict=True):
                done = is_done(latest[note.queue], note.stream, place)
                assert not done, f"{number} of {note} came again after {latest[note.queue]}"


def is_done(checkpoint: Note, stream: str, place: Place) -> bool:
    return tuple(place) < tuple(checkpoint.behind.get(stream, (checkpoint.next_offset, 0)))


def check_complete(
    name: str, got: Iterable[tuple[str, int]], published: Mapping[str, int], *, once: bool = False
) -> None:
    """All numbers of all streams came to a subscription, and none before one that is earlier had come; `once`: and no
    more often."""
    highest: dict[str, int] = defaultdict(lambda: -1)
    for stream, number in got:
        assert number <= highest[stream] + 1, f"{name}: {number} of {stream} overtook {highest[stream] + 1}"
        assert number > highest[stream] or not once, f"{name}: {number} of {stream} came again"
        highest[stream] = max(highest[stream], number)
    lost = {stream: (highest[stream] + 1, count) for stream, count in published.items() if highest[stream] + 1 < count}
    assert not lost, f"the first that never came, and how many there are: {lost}"
