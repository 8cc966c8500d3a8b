"""Requests that no honest client sends: absurd values in every field, and bytes that are no message at all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NAMES = ("fuzz-0", "fuzz-1", "fuzz-2", "fuzz-3")
"""Of subscriptions and consumers that are often hit, so that requests get further than to the first check."""
TEXTS = (
    *NAMES, *NAMES, "", "fuzz", "fuzz/*", "fuzz/0", "*/*", "fuzz/?[x]*", "fuzz/" + "*a" * 500, "default", "spare", "-",
    "\0", "a\nb", "\x7f\x1b[2J", "ü\U0010ffff", "../../x", "/", "~", "fuzz-0~c", "x" * 128, "y" * 129, "z" * 100_000,
    "%zz", "1.5", "-1", "18446744073709551616", "18446744073709551615.4294967295", "module:function",
)  # fmt: skip
BLOBS = (
    b"", b"x", b"\0" * 16, b"\xff" * 1000, b"[0,[]]", b"[9223372036854775807,[]]", b"[18446744073709551615,[]]",
    b'[3,[["fuzz","0",1,0,"",[[1,0,1]]]]]', b'[3,[["good","0",1,0,"",[]]]]', b"[" * 2000, b"p" * 300_000,
    b'[0,[["fuzz","0",0,0,"",[[0,0,9223372036854775807]]]]]',
)  # fmt: skip
DOUBLES = (0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324, 0.001, 1e-3, 1e18)

USUAL: dict[str, Sequence[Any]] = {
    "provider": ("", "", "default"),
    "subscription": NAMES,
    "name": NAMES,
    "consumer": NAMES,
    "selector": ("fuzz/*", "fuzz/1", "fuzz/?"),
    "filter": ("",),
    "namespace": ("fuzz",),
    "key": ("0", "1", "2"),
    "session_timeout_ms": (0, 500, 1000),
    "wait_ms": (0, 10, 300),
    "sizes": (1,),
    "payload": (b"p",),
    "queue": (0, 1),
    "queues": (0,),
    "offset": (0, 1, 2, 3, 10, 100),
    "index": (0, 0, 1, 5),
    "epoch": (0, 1, 1, 2, 3),
    "generation": (0, 0, 1),
    "number": (0, 1, 2),
    "count": (0, 1, 2),
    "token": (b"[0,[]]", b'[3,[["fuzz","0",1,0,"",[[1,0,1]]]]]'),
    "events": (1, 100),
    "bytes": (1000, 1 << 20),
    "earliest": (True,),
    "latest": (True,),
    "mode": (0, 1, 2, 3),
    "on_failure": (0, 1, 2, 3),
    "max_attempts": (1, 2),
    "initial_delay_s": (0.0, 0.01),
    "delay_ms": (0, 5),
}
"""What an honest client may have in a field of this name."""

_F = FieldDescriptor


def _integers(bits: int, *, signed: bool) -> Sequence[int]:
    top = (1 << (bits - signed)) - 1
    low = [-(top + 1), -top, -1] if signed else []
    return (*low, 0, 0, 1, 2, 3, 7, 100, 1000, 65_536, 600_000, 1 << 20, top // 2, top - 1, top)


_UNSIGNED_32, _SIGNED_32 = _integers(32, signed=False), _integers(32, signed=True)
_UNSIGNED_64, _SIGNED_64 = _integers(64, signed=False), _integers(64, signed=True)
_VALUES: dict[int, Sequence[Any]] = {
    _F.TYPE_STRING: TEXTS,
    _F.TYPE_BYTES: BLOBS,
    _F.TYPE_BOOL: (False, True),
    _F.TYPE_DOUBLE: DOUBLES,
    _F.TYPE_UINT32: _UNSIGNED_32,
    _F.TYPE_FIXED32: _UNSIGNED_32,
    _F.TYPE_UINT64: _UNSIGNED_64,
    _F.TYPE_INT64: _SIGNED_64,
    _F.TYPE_SINT64: _SIGNED_64,
    _F.TYPE_SFIXED64: _SIGNED_64,
    _F.TYPE_ENUM: (-(1 << 31), -1, 0, 1, 2, 3, 4, 1000, (1 << 31) - 1),
}


def absurd(kind: type[Message], rng: random.Random) -> Message:
    """A message of which many fields, some or none are as an honest client may set them, and the others whatever fits
    their type."""
    message = kind()
    _Filler(rng).fill(message, kind.DESCRIPTOR, depth=0)
    return message


class _Filler:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._usual = rng.choice((0.0, 0.5, 0.9, 0.95, 1.0))
        self._set = rng.choice((0.3, 0.6, 0.9, 1.0))
        """How often a field is as usual, and how often it is there."""

    def fill(self, message: Message, descriptor: Any, depth: int) -> None:
        for field in descriptor.fields:
            if self._rng.random() < self._set:
                self._fill_field(message, field, depth)

    def _fill_field(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        rng = self._rng
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(rng.choice((0, 1, 3))):
                getattr(message, field.name)[rng.choice(TEXTS)] = rng.choice(TEXTS)
        elif field.message_type is not None:
            if depth < 4:
                self._fill_message(message, field, depth)
        elif field.is_repeated:
            count = 1 if self._is_usual() else rng.choice((0, 1, 2, 5, 200))
            getattr(message, field.name).extend(self._value(field) for _ in range(count))
        else:
            setattr(message, field.name, self._value(field))

    def _fill_message(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        inner = getattr(message, field.name)
        if not field.is_repeated:
            inner.SetInParent()
            self.fill(inner, field.message_type, depth + 1)
            return
        for _ in range(self._rng.choice((0, 1, 1, 2, 20))):
            self.fill(inner.add(), field.message_type, depth + 1)

    def _is_usual(self) -> bool:
        return self._rng.random() < self._usual

    def _value(self, field: FieldDescriptor) -> Any:
        values = _VALUES[field.type]
        if self._is_usual():
            values = USUAL.get(field.name, values)
            if field.type == _F.TYPE_STRING and isinstance(values[0], bytes):
                values = ("1.0",)
        return self._rng.choice(values)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def mutated(encoded: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Some of a message's bytes are others, gone, or another message's."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        encoded = rng.choice(_MUTATIONS)(encoded, rng.choice(others), rng)
    return encoded[: 1 << 20]


def _flip(encoded: bytes, other: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(encoded)
    for _ in range(rng.choice((1, 3, 10))):
        if flipped:
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _truncate(encoded: bytes, _: bytes, rng: random.Random) -> bytes:
    return encoded[: rng.randint(0, len(encoded))]


def _splice(encoded: bytes, other: bytes, rng: random.Random) -> bytes:
    return encoded[: rng.randint(0, len(encoded))] + other[rng.randint(0, len(other)) :]


def _insert(encoded: bytes, _: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(encoded))
    return encoded[:at] + rng.randbytes(rng.choice((1, 2, 10, 300))) + encoded[at:]


def _repeat(encoded: bytes, _: bytes, rng: random.Random) -> bytes:
    return encoded * rng.choice((2, 3, 50))


def _append_unknown(encoded: bytes, _: bytes, rng: random.Random) -> bytes:
    """Fields that this version does not know, of all wire types."""
    field = rng.choice((16, 100, 19_999, (1 << 29) - 1))
    wire = rng.choice((0, 1, 2, 3, 5))
    value = {0: _varint(rng.getrandbits(64)), 1: b"8 octets", 2: _varint(3) + b"abc", 3: b"", 5: b"four"}[wire]
    end = _varint(field << 3 | 4) if wire == 3 else b""
    return encoded + _varint(field << 3 | wire) + value + end


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*data, number))


_MUTATIONS: Sequence[Callable[[bytes, bytes, random.Random], bytes]] = (
    _flip, _flip, _truncate, _splice, _splice, _insert, _repeat, _append_unknown,
)  # fmt: skip
