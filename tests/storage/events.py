"""The events of the workload, and the journal of what became of them.

A payload says which event it is and is made from it alone, so that a wrong one is known without a copy.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

NAMESPACE = "orders"


class Named(NamedTuple):
    """One event: its stream's key, and its number in it."""

    stream: str
    number: int


def payload_of(event: Named, size: int) -> bytes:
    head = f"{event.stream} {event.number} {size}|".encode()
    seed = hashlib.sha256(head).digest()
    return (head + seed * (size // len(seed) + 1))[: max(size, len(head))]


@lru_cache(maxsize=50_000)  # a check reads each event several times
def event_of(payload: bytes) -> Named:
    """The event whose payload this is. Raises ValueError if it differs from the published one."""
    stream, number, size = payload.partition(b"|")[0].decode().split(" ")
    event = Named(stream, int(number))
    if payload_of(event, int(size)) != payload:
        raise ValueError(f"a wrong payload of {event}")
    return event


class JournalWriter:
    """Writes lines that are in the recording, too: so they are in order with the writes to the disk."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def note(self, word: str, events: Iterable[Named] = ()) -> None:
        text = " ".join(f"{event.stream}:{event.number}" for event in events)
        os.write(self._file, f"{word} {text}\n".encode())


class Journal:
    """What the process knew up to a step."""

    def __init__(self) -> None:
        self.noted: dict[str, dict[Named, None]] = defaultdict(dict)
        """Events by word: asked (to publish), acknowledged, refused, done/SUB, saved/SUB, dead."""
        self.opened = False
        self.synced: frozenset[Named] = frozenset()
        """What was acknowledged before the last whole sync of the log began."""

    def read(self, lines: bytes) -> None:
        for line in lines.decode().splitlines():
            word, *events = line.split()
            self.opened |= word == "opened"
            noted = self.noted[word]
            for event in events:
                stream, number = event.split(":")
                noted[Named(stream, int(number))] = None

    def of(self, word: str) -> dict[Named, None]:
        return self.noted.get(word, {})
