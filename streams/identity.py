"""Names of streams, queues and positions."""

from __future__ import annotations

import re
from functools import cached_property
from typing import NamedTuple, Self

from .errors import InvalidArgument

MAX_NAME_BYTES = 1024
"""Limit of a namespace, and of a key, in UTF-8 bytes."""

_UNSAFE_IN_KEY = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029%*?]")
_UNSAFE_IN_NAMESPACE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029%*?/]")
_ESCAPE = re.compile(r"((?:%[0-9A-Fa-f]{2})+)")


class StreamId(tuple[str, str]):  # noqa: SLOT001 (what is computed once is kept in the instance)
    """The name of a virtual stream. It exists as soon as it is named; there may be millions.

    Namespace and key are compared separately: `StreamId("a", "b/c") != StreamId("a/b", "c")`. The class is a tuple, so
    that hashing and comparing, which each event needs, run at the speed of C.

    The text form is `namespace/key`, split at the first slash. It percent-encodes (UTF-8) slashes in the namespace, and
    in both parts `%`, `*`, `?`, control characters and line separators. So the text form is one line, and as a
    `Selector` it selects this stream only. `StreamId.parse(str(s)) == s` for every namespace and key.

    Raises InvalidArgument if a part is not a string, cannot be encoded as UTF-8, or exceeds `MAX_NAME_BYTES`.
    """

    def __new__(cls, namespace: str, key: str) -> Self:
        _check_name("namespace", namespace)
        _check_name("key", key)
        return super().__new__(cls, (namespace, key))

    @property
    def namespace(self) -> str:
        return self[0]

    @property
    def key(self) -> str:
        return self[1]

    def __getnewargs__(self) -> tuple[str, str]:
        return self[0], self[1]

    def __getstate__(self) -> None:
        """Pickle only the name, not the cached values."""

    def __str__(self) -> str:
        return f"{_UNSAFE_IN_NAMESPACE.sub(_quote, self.namespace)}/{_UNSAFE_IN_KEY.sub(_quote, self.key)}"

    def __repr__(self) -> str:
        return f"StreamId({self.namespace!r}, {self.key!r})"

    @cached_property
    def prefix(self) -> bytes:
        """The first bytes of every batch of this stream: fields 1 and 2 of an encoded `EventBatch`."""
        namespace = self.namespace.encode()
        key = self.key.encode()
        return b"".join((b"\x0a", varint(len(namespace)), namespace, b"\x12", varint(len(key)), key))

    @classmethod
    def of_prefix(cls, namespace: str, key: str, prefix: bytes) -> StreamId:
        """Return the stream of these names, whose `prefix` was read already."""
        stream = cls(namespace, key)
        stream.__dict__["prefix"] = prefix
        return stream

    @classmethod
    def parse(cls, text: str) -> StreamId:
        """Read the text form `namespace/key`. Raises InvalidArgument with the reason."""
        namespace, slash, key = text.partition("/")
        if not slash:
            raise InvalidArgument(f"{text!r} names no stream: write it as namespace/key")
        return cls(unquote(namespace, text), unquote(key, text))


class QueueId(NamedTuple):
    """One of the N physical queues of a provider, `index` 0 to N-1."""

    provider: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] (tuple.index is not missed)

    def __str__(self) -> str:
        return f"{self.provider}/{self.index}"


class SequenceToken(NamedTuple):
    """The position of an event: its batch's offset in the queue and its index in the batch.

    Tokens are compared as tuples, and strictly increase within a queue. The integers are unbounded. The text form is
    `offset` or `offset.index`.
    """

    offset: int
    index: int = 0  # pyright: ignore[reportIncompatibleMethodOverride] (tuple.index is not missed)

    def __str__(self) -> str:
        return f"{self.offset}.{self.index}" if self.index else str(self.offset)

    @classmethod
    def parse(cls, text: str) -> SequenceToken:
        match = re.fullmatch(r"(\d{1,99})(?:\.(\d{1,99}))?", text, re.ASCII)
        if match is None:
            raise InvalidArgument(f"{text!r} is not a token: write it as OFFSET or OFFSET.INDEX, as in 1200 or 1200.7")
        return cls(int(match[1]), int(match[2] or 0))


_ONE_BYTE = [bytes((value,)) for value in range(0x80)]


def varint(value: int) -> bytes:
    """Encode a non-negative integer as a protobuf varint."""
    if value < 0x80:
        return _ONE_BYTE[value]
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(message: bytes, at: int, max_bytes: int = 10) -> tuple[int, int]:
    """Return the protobuf varint at an index, and the index of its end. Raises IndexError if it is cut short or longer
    than `max_bytes`, which is at least 3."""
    byte = message[at]
    if byte < 0x80:
        return byte, at + 1
    second = message[at + 1]
    if second < 0x80:
        return byte & 0x7F | second << 7, at + 2
    third = message[at + 2]
    value = byte & 0x7F | (second & 0x7F) << 7 | (third & 0x7F) << 14
    if third < 0x80:
        return value, at + 3
    at += 2
    for shift in range(21, 7 * max_bytes, 7):
        at += 1
        byte = message[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
    raise IndexError


def unquote(part: str, text: str) -> str:
    """Decode the percent escapes of a piece of `text`. Raises InvalidArgument with the reason."""
    if "%" not in part:
        return part
    pieces = _ESCAPE.split(part)
    if any("%" in plain for plain in pieces[::2]):
        raise InvalidArgument(f"{text!r} has a % that begins no escape such as %2F: write a plain % as %25")
    try:
        return "".join(bytes.fromhex(p.replace("%", "")).decode() if i % 2 else p for i, p in enumerate(pieces))
    except UnicodeDecodeError:
        raise InvalidArgument(f"{text!r} has percent escapes that are not UTF-8") from None


def _check_name(part: str, value: object) -> None:
    if type(value) is str and value.isascii() and len(value) <= MAX_NAME_BYTES:
        return  # true of nearly every name
    if not isinstance(value, str):
        raise InvalidArgument(f"a stream's {part} is a string, not {type(value).__name__}: {value!r}")
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(f"a stream's {part} has a lone surrogate, which UTF-8 cannot encode: {value!r}") from None
    if size > MAX_NAME_BYTES:
        raise InvalidArgument(f"a stream's {part} has {size:,} bytes in UTF-8, the limit is {MAX_NAME_BYTES:,}")


def _quote(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())
