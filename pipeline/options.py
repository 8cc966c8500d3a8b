"""The source's options, as users give them to Spark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from ..streams.arguments import shown
from ..streams.errors import InvalidArgument
from ..streams.identity import SequenceToken
from ..streams.subscriptions import Selector
from .columns import DEFAULT, TYPES
from .ddl import check_fields
from .place import OPTIONS as PLACE_OPTIONS
from .place import flag

VALUE = "value"
"""The column of decoded payloads, a struct."""
EARLIEST, LATEST = "earliest", "latest"
_SOURCE_OPTIONS = (
    *("namespace", "key", "columns", "failOnDataLoss"),
    *("start", "startingOffsets", "startingTimestamp", "end", "endingOffsets", "endingTimestamp"),
    *("maxEventsPerTrigger", "maxBytesPerTrigger", "minEventsPerTrigger", "maxTriggerDelay", "eventsPerPartition"),
    "decode",
    *(_OF_DECODE := ("payloadSchema", "descriptor", "message", "decodeErrors")),
)
_SPARK_OPTIONS = ("path", "checkpointlocation", "queryname")
"""Spark passes these on as well."""
_KAFKA_OPTIONS = {
    "assign": "namespace and key",
    "kafka.bootstrap.servers": "server",
    "maxoffsetspertrigger": "maxEventsPerTrigger",
    "minoffsetspertrigger": "minEventsPerTrigger",
    "minpartitions": "eventsPerPartition",
    "startingoffsetsbytimestamp": "startingTimestamp",
    "endingoffsetsbytimestamp": "endingTimestamp",
    "subscribe": "namespace and key",
    "subscribepattern": "namespace and key",
}
"""Options of Spark's Kafka source, and their names here."""
OFFSET_EARLIEST, OFFSET_LATEST = -2, -1
"""Offsets with a meaning, as in Spark's Kafka source."""
_DELAY_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DEFAULT_DELAY_S = 900.0
"""The default of `maxTriggerDelay` in Spark's Kafka source."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class OffsetPositions(NamedTuple):
    """An offset for each queue that is named. -2: the earliest one, -1: the latest one."""

    by_queue: Mapping[int, int]


class TimePosition(NamedTuple):
    """The first batch stored at or after a time, in microseconds since 1970 UTC."""

    time_us: int


class TokenPosition(NamedTuple):
    """A position in the queue of the only stream that is read."""

    offset: int


Position = str | OffsetPositions | TimePosition | TokenPosition
"""`EARLIEST`, `LATEST`, or one of the others."""


class DecodeOptions(NamedTuple):
    """The options that decode payloads into the column `value`."""

    form: Literal["json", "protobuf"]
    fail: bool
    """False: a payload that cannot be decoded has the value null."""
    schema: str = ""
    """For JSON, the fields as Spark's DDL has them."""
    descriptor: str = ""
    """For protobuf, the file with the descriptor set, and the message in it."""
    message: str = ""


class SourceOptions(NamedTuple):
    """The options of the source, checked."""

    selector: Selector
    start: Position
    end: Position
    columns: Sequence[str]
    fail_on_data_loss: bool
    max_events: int | None
    max_bytes: int | None
    min_events: int | None
    """A micro-batch waits for about so many events, at most for `max_delay_s`."""
    max_delay_s: float
    events_per_partition: int | None
    """None: chosen by the number of events to read."""
    decode: DecodeOptions | None


def source_options(given: Mapping[str, str]) -> SourceOptions:
    """Check all options. Raise InvalidArgument that names the option."""
    check_names(given, (*PLACE_OPTIONS, *_SOURCE_OPTIONS))
    options = {name.lower(): value for name, value in given.items()}
    selector = _selector(options)
    return SourceOptions(
        selector=selector,
        start=_position_option("start", "starting", options, selector) or EARLIEST,
        end=_position_option("end", "ending", options, selector) or LATEST,
        columns=_columns(options.get("columns"), "decode" in options),
        fail_on_data_loss=flag("failOnDataLoss", options.get("failondataloss", "true")),
        max_events=_positive("maxEventsPerTrigger", options.get("maxeventspertrigger")),
        max_bytes=_positive("maxBytesPerTrigger", options.get("maxbytespertrigger")),
        min_events=_positive("minEventsPerTrigger", options.get("mineventspertrigger")),
        max_delay_s=_delay_s(options),
        events_per_partition=_positive("eventsPerPartition", options.get("eventsperpartition")),
        decode=_decode(options),
    )


def check_names(given: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise InvalidArgument for the first unknown option. The case of names does not matter."""
    lower = {name.lower() for name in known} | set(_SPARK_OPTIONS)
    for name in given:
        if (instead := _KAFKA_OPTIONS.get(name.lower())) is not None:
            raise InvalidArgument(f"option {name!r} belongs to Spark's Kafka source: here it is {instead}")
        if name.lower() not in lower:
            raise InvalidArgument(f"option {name!r} is unknown: there are {', '.join(known)}")


def as_texts(options: Mapping[str, object]) -> dict[str, str]:
    """Return options of a Python call as Spark passes them on: as texts."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


def job_options(job: str, options: Mapping[str, object], known: Sequence[str]) -> dict[str, str]:
    """Return the options of a job as texts, by their names in `known`. Raise InvalidArgument for an unknown one."""
    names = {name.lower(): name for name in known}
    if wrong := next((name for name in options if name.lower() not in names), None):
        raise InvalidArgument(f"option {wrong!r} is not for {job}: it takes {', '.join(known)}")
    return {names[name.lower()]: text for name, text in as_texts(options).items()}


def _positive(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,18}", value, re.ASCII) or not int(value):
        raise InvalidArgument(f"option {name!r} is a number from 1 on, not {value!r}")
    return int(value)


def _delay_s(options: Mapping[str, str]) -> float:
    value = options.get("maxtriggerdelay")
    if value is None:
        return _DEFAULT_DELAY_S
    if "mineventspertrigger" not in options:
        raise InvalidArgument("option 'maxTriggerDelay' needs the option 'minEventsPerTrigger'")
    found = re.fullmatch(r"(\d{1,9})(ms|s|m|h)", value, re.ASCII)
    if found is None:
        raise InvalidArgument(f"option 'maxTriggerDelay' is a duration such as 500ms, 30s, 15m or 1h, not {value!r}")
    return int(found[1]) * _DELAY_UNITS_S[found[2]]


def _selector(options: Mapping[str, str]) -> Selector:
    namespace, key = options.get("namespace", "*"), options.get("key", "*")
    if "/" in namespace:
        raise InvalidArgument(f"option 'namespace' has a slash: {namespace!r}: write %2F for a slash of the name")
    try:
        return Selector(f"{namespace}/{key}")
    except InvalidArgument as error:
        raise InvalidArgument(f"option 'namespace' or 'key': {error}") from None


def _decode(options: Mapping[str, str]) -> DecodeOptions | None:
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
        check_fields("payloadSchema", options["payloadschema"])
        return DecodeOptions("json", errors == "fail", schema=options["payloadschema"])
    if form == "protobuf":
        _check_decode("protobuf", options, needed=("descriptor", "message"), others=("payloadSchema",))
        return DecodeOptions("protobuf", errors == "fail", descriptor=options["descriptor"], message=options["message"])
    raise InvalidArgument(f"option 'decode' is json or protobuf, not {form!r}")


def _check_decode(form: str, options: Mapping[str, str], needed: Sequence[str], others: Sequence[str]) -> None:
    for name in needed:
        if name.lower() not in options:
            raise InvalidArgument(f"option {name!r} is missing: decode={form} needs it")
    for name in others:
        if name.lower() in options:
            raise InvalidArgument(f"option {name!r} is not for decode={form}")


def _columns(value: str | None, decoded: bool) -> Sequence[str]:
    """Return the columns to read. With decoding, `value` replaces `payload`."""
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


def _position_option(name: str, prefix: str, options: Mapping[str, str], selector: Selector) -> Position | None:
    """Return the position that one of three options gives: `start`, `startingOffsets` or `startingTimestamp`."""
    offsets, timestamp = f"{prefix}Offsets", f"{prefix}Timestamp"
    given = [option for option in (name, offsets, timestamp) if option.lower() in options]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidArgument(f"options {given[0]!r} and {given[1]!r} both give a position: leave one out")
    option, value = given[0], options[given[0].lower()]
    if option == name:
        return _position(option, value, selector)
    if option == timestamp:
        if not re.fullmatch(r"\d{1,15}", value, re.ASCII):
            raise InvalidArgument(f"option {option!r} is a time in milliseconds since 1970 UTC, not {value!r}")
        return TimePosition(int(value) * 1000)
    if value in (EARLIEST, LATEST) or value.startswith("{"):
        return _position(option, value, selector)
    raise InvalidArgument(f'option {option!r} is earliest, latest or {{"QUEUE": OFFSET, …}}, not {value!r}')


def _position(name: str, value: str, selector: Selector) -> Position:
    if value in (EARLIEST, LATEST):
        return value
    if value.startswith("{"):
        return OffsetPositions(_offsets(name, value))
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
    return TimePosition((when - _EPOCH) // timedelta(microseconds=1))


def _token(name: str, value: str, selector: Selector) -> TokenPosition:
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
    return TokenPosition(token.offset)


def _offsets(name: str, value: str) -> Mapping[int, int]:
    try:
        content: Any = json.loads(value)
        offsets = {int(queue): offset for queue, offset in content.items()}
        right = all(type(offset) is int and offset >= OFFSET_EARLIEST for offset in offsets.values())
    except (ValueError, AttributeError, RecursionError):
        right, offsets = False, {}
    if not right:
        raise InvalidArgument(
            f'option {name!r}: expected the offset of each queue, such as {{"0": 1200, "1": -2}} '
            f"(-2: earliest, -1: latest), not {shown(value)}"
        )
    return offsets


def selector_options(pattern: str) -> dict[str, Any]:
    """Return the source's options for a selector `namespace/key`. Raise InvalidArgument."""
    namespace, _, key = Selector(pattern).pattern.partition("/")
    return {"namespace": namespace, "key": key}
