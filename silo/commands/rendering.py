"""Events as text, and filters on them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from ...streams import Event, InvalidArgument
from ...streams.handlers import EventFilter

Format = Literal["json", "raw", "text"]


def renderer(format_: Format) -> Callable[[Event], bytes]:
    """How to print an event, with its line feed."""
    return {"json": _json, "raw": _raw, "text": _text}[format_]


def document(event: Event) -> dict[str, Any]:
    """What JSON says of an event. A payload that is no UTF-8 text is in base64, and `encoding` says so."""
    return {
        "stream": str(event.stream),
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
    """ISO 8601 in UTC; microseconds since 1970 outside of the years 1 to 9999."""
    try:
        return event.time.isoformat() if event.time else None
    except InvalidArgument:
        return event.timestamp_us


def _json(event: Event) -> bytes:
    return msgspec.json.encode(document(event)) + b"\n"


def _raw(event: Event) -> bytes:
    return event.payload + b"\n"


def _text(event: Event) -> bytes:
    payload = event.payload.decode(errors="backslashreplace").replace("\r", "\\r").replace("\n", "\\n")
    return f"{event.stream} {event.token} {payload}\n".encode()


def parse_filter(text: str) -> EventFilter:
    """A predicate from `header:NAME=VALUE` or `field:NAME=VALUE`. Raises InvalidArgument.

    A field is one of the JSON object that is the payload; its value is compared as text, or as JSON where it is none.
    """
    kind, colon, rest = text.partition(":")
    name, equals, value = rest.partition("=")
    if not (colon and equals and name) or kind not in ("header", "field"):
        raise InvalidArgument(f"--filter {text}: write it as header:NAME=VALUE or field:NAME=VALUE")
    if kind == "header":
        return lambda event: event.headers.get(name) == value
    return lambda event: _field(event.payload, name) == value


def all_of(filters: Sequence[EventFilter]) -> EventFilter | None:
    """An event passes where all of them let it; None for no filter."""
    return (lambda event: all(passes(event) for passes in filters)) if filters else None


def _field(payload: bytes, name: str) -> str | None:
    try:
        content = msgspec.json.decode(payload)
    except ValueError:
        return None
    if not isinstance(content, dict) or name not in content:
        return None
    value: object = content[name]  # pyright: ignore[reportUnknownVariableType]
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
