"""Keys of raw records, and the keys of the streams that they stand for. Pure.

A key that is text in UTF-8 is the stream's key. Every other key has a name that begins with `kafka:`, so two different
keys never have the same stream. docs/kafka.md has the table.
"""

from __future__ import annotations

import base64
import binascii
from hashlib import blake2b
from typing import NamedTuple

from ...streams.errors import InvalidArgument
from ...streams.identity import MAX_NAME_BYTES

ESCAPE = "kafka:"
_NULL, _BASE64, _HASH = f"{ESCAPE}null:", f"{ESCAPE}base64:", f"{ESCAPE}blake2b:"
_DIGEST_BYTES = 16


def stream_key(key: bytes | None, partition: int) -> str:
    """Return the key of the stream that a record in a partition belongs to.

    Records without a key have one stream for each partition. A key that is too long for a name is hashed.
    """
    if key is None:
        return f"{_NULL}{partition}"
    if len(key) <= MAX_NAME_BYTES:
        try:
            text = key.decode()
        except UnicodeDecodeError:
            text = ESCAPE
        if not text.startswith(ESCAPE):
            return text
        text = as_base64(key)
        if len(text) <= MAX_NAME_BYTES:
            return text
    return f"{_HASH}{partition}:{blake2b(key, digest_size=_DIGEST_BYTES).hexdigest()}"


def as_base64(value: bytes) -> str:
    """Return bytes that are not UTF-8 as a text."""
    return _BASE64 + base64.urlsafe_b64encode(value).decode()


class RecordKey(NamedTuple):
    """The key of the records of one stream."""

    key: bytes | None
    """None for records without a key, and if only the hash of the key is known."""
    partition: int | None = None
    """The only partition that has records of the stream. None: the partitioner says which one."""
    is_hashed: bool = False
    """Whether only the hash of the key is known, so that nothing can be published."""


def record_key(text: str) -> RecordKey:
    """Return the key of the records of a stream, by the stream's key. Raises InvalidArgument for a key that begins with
    `kafka:` and that no record has."""
    if not text.startswith(ESCAPE):
        return RecordKey(text.encode())
    try:
        if text.startswith(_NULL):
            found = RecordKey(None, int(text.removeprefix(_NULL)))
            known = f"{_NULL}{found.partition}"
        elif text.startswith(_HASH):
            partition, _, digest = text.removeprefix(_HASH).partition(":")
            found = RecordKey(None, int(partition), is_hashed=True)
            known = f"{_HASH}{found.partition}:{bytes.fromhex(digest).hex()}"
        else:
            found = RecordKey(base64.urlsafe_b64decode(text.removeprefix(_BASE64)))
            known = stream_key(found.key, 0)
    except (ValueError, binascii.Error):
        known = ""
        found = RecordKey(None)
    if known != text:
        raise InvalidArgument(
            f"the key {text!r} is the name of no record's key: keys that begin with {ESCAPE!r} are for records without "
            "a key, and for keys that are not text; use another key"
        )
    return found
