"""Events as text, and filters on them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from ...streams.errors import InvalidArgument
from ...streams.events import Event
from ...streams.options import EventFilter

Format = Literal["json", "raw", "text"]


Render = Callable[[Event, int], bytes]
"""Returns the line for an event of the queue with this number, with its line feed."""


def renderer(format_: Format) -> Render:
    """The function that renders an event in a format."""
    return {"json": _json, "raw": _raw, "text": _text}[format_]


def document(event: Event, queue: int) -> dict[str, Any]:
    """An event as a JSON document. A payload that is no UTF-8 text is in base64; then `encoding` says so."""
    return {
        "stream": str(event.stream),
        "queue": queue,
        "token": str(event.token),
        "timestamp": timestamp(event),
        "id": event.id,
        "headers": dict(event.headers),
        **payload_fields(event.payload),
    }


def payload_fields(payload: bytes) -> dict[str, str]:
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload": base64.b64encode(payload).decode(), "encoding": "base64"}


def timestamp(event: Event) -> str | int | None:
    """The time in ISO 8601, UTC; outside of the years 1 to 9999, microseconds since 1970."""
    try:
        return event.time.isoformat() if event.time else None
    except InvalidArgument:
        return event.timestamp_us


def _json(event: Event, queue: int) -> bytes:
    return msgspec.json.encode(document(event, queue)) + b"\n"


def _raw(event: Event, _: int) -> bytes:
    return event.payload + b"\n"


def _text(event: Event, _: int) -> bytes:
    payload = event.payload.decode(errors="backslashreplace").replace("\r", "\\r").replace("\n", "\\n")
    return f"{event.stream} {event.token} {payload}\n".encode()


def parse_filter(text: str) -> EventFilter:
    """A predicate from `header:NAME=VALUE` or `field:NAME=VALUE`. Raises InvalidArgument.

    A field belongs to the payload, a JSON object. Its value is compared as text, or as JSON if it is not text.
    """
    kind, colon, rest = text.partition(":")
    name, equals, value = rest.partition("=")
    if not (colon and equals and name) or kind not in ("header", "field"):
        raise InvalidArgument(f"--filter {text}: write it as header:NAME=VALUE or field:NAME=VALUE")
    if kind == "header":
        return lambda event: event.headers.get(name) == value
    return lambda event: _field(event.payload, name) == value


def all_of(filters: Sequence[EventFilter]) -> EventFilter | None:
    """A filter that passes an event if all `filters` do; None if there are none."""
    return (lambda event: all(passes(event) for passes in filters)) if filters else None


def _field(payload: bytes, name: str) -> str | None:
    try:
        content = msgspec.json.decode(payload)
    except (ValueError, RecursionError):  # the second one for JSON that is nested too deeply
        return None
    if not isinstance(content, dict) or name not in content:
        return None
    value: object = content[name]  # pyright: ignore[reportUnknownVariableType]
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
