"""The source's options, as users give them to Spark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from ..streams.errors import InvalidArgument
from ..streams.identity import SequenceToken
from ..streams.subscriptions import Selector
from .columns import DEFAULT, TYPES
from .place import OPTIONS as PLACE_OPTIONS
from .place import flag

VALUE = "value"
"""The column that has what was decoded, a struct."""
EARLIEST, LATEST = "earliest", "latest"
_SOURCE_OPTIONS = (
    *("namespace", "key", "start", "end", "columns", "failOnDataLoss"),
    *("maxEventsPerTrigger", "maxBytesPerTrigger", "eventsPerPartition"),
    "decode",
    *(_OF_DECODE := ("payloadSchema", "descriptor", "message", "decodeErrors")),
)
_SPARK_OPTIONS = ("path", "checkpointlocation", "queryname")
"""Spark passes these on as well."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Offsets(NamedTuple):
    """A position in each queue that is named, exclusive as everywhere."""

    by_queue: Mapping[int, int]


class At(NamedTuple):
    """The first batch stored at or after a time, in microseconds since 1970 UTC."""

    time_us: int


class Token(NamedTuple):
    """A position in the queue of the one stream that is read."""

    offset: int


Position = str | Offsets | At | Token
"""`EARLIEST`, `LATEST`, or one of the others."""


class Decode(NamedTuple):
    """How payloads become the column `value`."""

    form: Literal["json", "protobuf"]
    fail: bool
    """Else a payload that cannot be decoded has the value null."""
    schema: str = ""
    """For JSON, the fields as Spark's DDL has them."""
    descriptor: str = ""
    """For protobuf, the file with the descriptor set, and the message in it."""
    message: str = ""


class SourceOptions(NamedTuple):
    """What is read, from where to where, and how much at once."""

    selector: Selector
    start: Position
    end: Position
    columns: Sequence[str]
    fail_on_data_loss: bool
    max_events: int | None
    max_bytes: int | None
    events_per_partition: int | None
    """None: as it suits what is to be read."""
    decode: Decode | None


def source_options(given: Mapping[str, str]) -> SourceOptions:
    """Check all options. Raises InvalidArgument with a line that names the option."""
    check_names(given, (*PLACE_OPTIONS, *_SOURCE_OPTIONS))
    options = {name.lower(): value for name, value in given.items()}
    selector = _selector(options)
    return SourceOptions(
        selector=selector,
        start=_position("start", options.get("start", EARLIEST), selector),
        end=_position("end", options.get("end", LATEST), selector),
        columns=_columns(options.get("columns"), "decode" in options),
        fail_on_data_loss=flag("failOnDataLoss", options.get("failondataloss", "true")),
        max_events=_positive("maxEventsPerTrigger", options.get("maxeventspertrigger")),
        max_bytes=_positive("maxBytesPerTrigger", options.get("maxbytespertrigger")),
        events_per_partition=_positive("eventsPerPartition", options.get("eventsperpartition")),
        decode=_decode(options),
    )


def check_names(given: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise InvalidArgument for the first option that is not known. Names are the same in any case."""
    lower = {name.lower() for name in known} | set(_SPARK_OPTIONS)
    for name in given:
        if name.lower() not in lower:
            raise InvalidArgument(f"option {name!r} is unknown: there are {', '.join(known)}")


def _positive(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,18}", value, re.ASCII) or not int(value):
        raise InvalidArgument(f"option {name!r} is a number from 1 on, not {value!r}")
    return int(value)


def _selector(options: Mapping[str, str]) -> Selector:
    namespace, key = options.get("namespace", "*"), options.get("key", "*")
    if "/" in namespace:
        raise InvalidArgument(f"option 'namespace' has a slash: {namespace!r}: write %2F where the name has one")
    try:
        return Selector(f"{namespace}/{key}")
    except InvalidArgument as error:
        raise InvalidArgument(f"option 'namespace' or 'key': {error}") from None


def _decode(options: Mapping[str, str]) -> Decode | None:
    form = options.get("decode")
    if form is None:
        if given := next((name for name in _OF_DECODE if name.lower() in options), None):
            raise InvalidArgument(f"option {given!r} needs the option 'decode', which is json or protobuf")
        return None
    errors = options.get("decodeerrors", "fail")
    if errors not in ("fail", "null"):
        raise InvalidArgument(f"option 'decodeErrors' is fail or null, not {errors!r}")
    if form == "json":
        _check_decode("json", options, needed=("payloadSchema",), others=("descriptor", "message"))
        return Decode("json", errors == "fail", schema=options["payloadschema"])
    if form == "protobuf":
        _check_decode("protobuf", options, needed=("descriptor", "message"), others=("payloadSchema",))
        return Decode("protobuf", errors == "fail", descriptor=options["descriptor"], message=options["message"])
    raise InvalidArgument(f"option 'decode' is json or protobuf, not {form!r}")


def _check_decode(form: str, options: Mapping[str, str], needed: Sequence[str], others: Sequence[str]) -> None:
    for name in needed:
        if name.lower() not in options:
            raise InvalidArgument(f"option {name!r} is missing: decode={form} needs it")
    for name in others:
        if name.lower() in options:
            raise InvalidArgument(f"option {name!r} is not for decode={form}")


def _columns(value: str | None, decoded: bool) -> Sequence[str]:
    """Where payloads are decoded, `value` is in the place of `payload`."""
    there = [VALUE if decoded and name == "payload" else name for name in TYPES]
    if value is None:
        return there[: len(DEFAULT)]
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in there:
            raise InvalidArgument(f"option 'columns': there is no column {name!r}, there are {', '.join(there)}")
    if len(set(names)) < len(names):
        raise InvalidArgument(f"option 'columns' names one twice: {value!r}")
    return names


def _position(name: str, value: str, selector: Selector) -> Position:
    if value in (EARLIEST, LATEST):
        return value
    if value.startswith("{"):
        return Offsets(_offsets(name, value))
    if re.fullmatch(r"[\d.]+", value, re.ASCII):
        return _token(name, value, selector)
    try:
        when = datetime.fromisoformat(value)
    except ValueError:
        raise InvalidArgument(
            f"option {name!r} is earliest, latest, a time such as 2026-11-21T10:00:00+00:00, a token of the one stream "
            f'that is read, or {{"QUEUE": OFFSET, …}}, not {value!r}'
        ) from None
    if when.tzinfo is None:
        raise InvalidArgument(f"option {name!r}: the time {value!r} has no zone: add one, such as +00:00")
    return At((when - _EPOCH) // timedelta(microseconds=1))


def _token(name: str, value: str, selector: Selector) -> Token:
    try:
        token = SequenceToken.parse(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"option {name!r}: {error}") from None
    if not selector.explicit:
        raise InvalidArgument(
            f"option {name!r}: a token such as {value!r} belongs to one stream: name it by 'namespace' and 'key', or "
            'give offsets by queue, {"QUEUE": OFFSET, …}'
        )
    if token.index:
        raise InvalidArgument(f"option {name!r}: reading begins with a batch: write {token.offset}, not {value!r}")
    return Token(token.offset)


def _offsets(name: str, value: str) -> Mapping[int, int]:
    try:
        content: Any = json.loads(value)
        offsets = {int(queue): offset for queue, offset in content.items()}
        right = all(type(offset) is int and offset >= 0 for offset in offsets.values())
    except (ValueError, AttributeError):
        right, offsets = False, {}
    if not right:
        raise InvalidArgument(f'option {name!r} has offsets as {{"0": 1200, "1": 0}}, not {value!r}')
    return offsets
