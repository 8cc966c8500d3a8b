"""Reads lines of a file or of stdin, as soon as they are there, and parses them as events."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import msgspec

from ...streams.errors import InvalidArgument
from ...streams.events import MAX_EVENT_BYTES, Event
from ...streams.field_limits import check_ids, check_times
from ...streams.identity import StreamId

CHUNK_BYTES = 256 << 10
_FAR_S = 1e12
_MARK = b"\xef\xbb\xbf"
"""Byte order mark, which some programs put at the start of a file."""


class BadLine(Exception):
    """A line that is not an event. It has the line's number and the reason."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class LineFormat:
    """How lines are parsed as events. It is part of a journal's key: another format is another publish."""

    format: str
    """`json` or `raw`."""
    stream: str | None = None
    namespace: str | None = None
    key_field: str | None = None
    id_field: str | None = None
    time_field: str | None = None

    def __post_init__(self) -> None:
        if (self.stream is None) == (self.namespace is None and self.key_field is None):
            raise InvalidArgument("name the stream: either --stream ns/key, or --namespace ns and --key-field FIELD")
        if self.stream is None and (self.namespace is None or self.key_field is None):
            raise InvalidArgument("--namespace and --key-field go together: each event's stream is namespace/its key")
        fields = self.key_field or self.id_field or self.time_field
        if self.format == "raw" and fields:
            raise InvalidArgument(f"--format raw has no fields: {fields!r} needs --format json")
        self._stream  # noqa: B018 (refuses a bad name before anything is read)

    @cached_property
    def _stream(self) -> StreamId | None:
        return None if self.stream is None else StreamId.parse(self.stream)

    def event(self, line: bytes) -> tuple[StreamId, bytes | Event] | None:
        """Parse a line; None for a blank one between JSON lines. Raises ValueError with the reason."""
        payload = line.removesuffix(b"\r")
        if len(payload) > MAX_EVENT_BYTES:
            # The length of the line is not known: perhaps only its beginning was read.
            raise ValueError(f"longer than {MAX_EVENT_BYTES:,} bytes, the limit of a payload")
        if self.format == "raw":
            assert self._stream is not None
            return self._stream, payload
        payload = payload.removeprefix(_MARK)
        return self._json_event(payload) if payload and not payload.isspace() else None

    def _json_event(self, payload: bytes) -> tuple[StreamId, bytes | Event]:
        try:
            content = msgspec.json.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the second one before msgspec 0.23
            raise ValueError(_not_utf8(payload) or f"not JSON: {error}") from None
        except RecursionError:
            raise ValueError("the JSON is nested too deeply: use --format raw") from None
        stream = self._stream or _stream(self.namespace or "", _key(content, self.key_field or ""))
        if self.id_field is None and self.time_field is None:
            return stream, payload
        return stream, Event(
            payload,
            id=None if self.id_field is None else _id(content, self.id_field),
            timestamp_us=None if self.time_field is None else _time_us(content, self.time_field),
        )


def _not_utf8(payload: bytes) -> str:
    """Return why the bytes are not text, "" if they are."""
    try:
        payload.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start} of the line: save the file as UTF-8, or use --format raw"
    return ""


@lru_cache(maxsize=1 << 16)
def _stream(namespace: str, key: str) -> StreamId:
    return StreamId(namespace, key)


def _field(content: Any, name: str) -> Any:
    if not isinstance(content, dict):
        raise ValueError("not a JSON object, so it has no fields")  # noqa: TRY004 (the line is wrong, not the call)
    if name not in content:
        raise ValueError(f"has no field {name!r}")
    return content[name]  # pyright: ignore[reportUnknownVariableType]


def _key(content: Any, name: str) -> str:
    value = _field(content, name)
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"field {name!r} is neither text nor a whole number")


def _id(content: Any, name: str) -> str:
    value = _key(content, name)
    check_ids([value])
    return value


def _time_us(content: Any, name: str) -> int:
    value = _field(content, name)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _FAR_S:
        time_us = int(value * 1_000_000)
    else:
        when = _datetime(value) if isinstance(value, str) else None
        if when is None or when.tzinfo is None:
            raise ValueError(f"field {name!r} is not a time: write seconds since 1970, or 2026-11-21T10:00:00+00:00")
        time_us = int(when.timestamp() * 1_000_000)
    check_times([time_us], f"field {name!r}")
    return time_us


def _datetime(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


class NumberedLines(NamedTuple):
    """Some lines in a row, without their line feeds. `first` is the number of the first, from 1."""

    first: int
    lines: list[bytes]
    ended: bool
    """Whether the last line has a line feed."""

    def raw(self, count: int) -> bytes:
        """The first `count` lines as they are in the file."""
        text = b"\n".join(self.lines[:count])
        return text + b"\n" if count and (count < len(self.lines) or self.ended) else text

    def cut(self, most: int) -> Generator[NumberedLines]:
        """Cut into parts of at most `most` lines."""
        for at in range(0, len(self.lines), most):
            last = at + most >= len(self.lines)
            yield NumberedLines(self.first + at, self.lines[at : at + most], self.ended or not last)


async def read_lines(descriptor: int, first: int = 1) -> AsyncGenerator[NumberedLines]:
    """Read the lines of a file, pipe or terminal, as many at a time as are there. Waits for a pipe without blocking.

    A line above the size limit of an event is cut, and is the last one.
    """
    tail = b""
    while chunk := await _read(descriptor):
        *lines, tail = (tail + chunk).split(b"\n")
        if lines:
            yield NumberedLines(first, lines, ended=True)
            first += len(lines)
        if len(tail) > MAX_EVENT_BYTES + 1:
            break
    if tail:
        yield NumberedLines(first, [tail], ended=False)


async def _read(descriptor: int) -> bytes:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except PermissionError:
        return os.read(descriptor, CHUNK_BYTES)  # a regular file, which is always ready
    try:
        await ready.wait()
        return os.read(descriptor, CHUNK_BYTES)
    finally:
        loop.remove_reader(descriptor)
