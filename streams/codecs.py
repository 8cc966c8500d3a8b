"""Codecs: how values of Python types become payloads, and payloads values.

`bytes` are payloads as they are, and a `str` is its UTF-8 text. A codec does the rest: instances of msgspec structs,
pydantic models and dataclasses, and dictionaries. A provider has one codec, or one for each namespace. The codec is not
stored with the events, so all programs that use a namespace have to agree on it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field
from typing import Any, ClassVar, Protocol, TypeVar, cast, runtime_checkable

import msgspec

from .arguments import refused, shown
from .errors import InvalidArgument, PayloadInvalid
from .events import Event
from .identity import StreamId

OTHERS = "*"
"""Key of the codec for all namespaces without one of their own."""


class DataclassInstance(Protocol):
    """An instance of a dataclass, as type checkers see it."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class ModelInstance(Protocol):
    """An instance of a pydantic model, as type checkers see it."""

    def model_dump_json(self) -> str: ...


Payload = bytes | str | Mapping[str, Any] | msgspec.Struct | DataclassInstance | ModelInstance
"""The values that can be published."""
Publishable = Payload | Event
P = TypeVar("P", bound=Payload)


@runtime_checkable
class Codec(Protocol):
    """Encodes values as payloads, and decodes them. Both raise any exception if they cannot."""

    def encode(self, value: Any, /) -> bytes:
        """Return the payload of a value that is neither `bytes` nor `str`."""
        ...

    def decoder(self, kind: Any, /) -> Callable[[bytes], Any]:
        """Return a function that decodes payloads as values of type `kind`. Called once for each handler."""
        ...


class JsonCodec:
    """Payloads are JSON. The default."""

    def encode(self, value: Any, /) -> bytes:
        if is_model(type(value)):
            return value.model_dump_json().encode()
        return msgspec.json.encode(value, enc_hook=_plain)

    def decoder(self, kind: Any, /) -> Callable[[bytes], Any]:
        if is_model(kind):
            return kind.model_validate_json
        return msgspec.json.Decoder(kind, dec_hook=_model).decode


class MsgpackCodec:
    """Payloads are MessagePack."""

    def encode(self, value: Any, /) -> bytes:
        return msgspec.msgpack.encode(value, enc_hook=_plain)

    def decoder(self, kind: Any, /) -> Callable[[bytes], Any]:
        return msgspec.msgpack.Decoder(kind, dec_hook=_model).decode


CodecOption = str | Codec | Mapping[str, str | Codec]
"""A codec, its name, or codecs by namespace, with "*" for the others."""
_NAMED: Mapping[str, Codec] = {"json": JsonCodec(), "msgpack": MsgpackCodec()}


class Codecs:
    """The codecs of a provider."""

    def __init__(self, given: CodecOption | None = None) -> None:
        """Raises InvalidArgument for an unknown name, or anything else that is no codec."""
        by_namespace = given if isinstance(given, Mapping) else {OTHERS: given}
        codecs = {namespace: _codec(codec) for namespace, codec in by_namespace.items()}
        self._others = codecs.pop(OTHERS, _NAMED["json"])
        self._codecs = codecs

    def encode(self, stream: StreamId, value: object) -> bytes:
        """Return the payload of a value. Raises PayloadInvalid if the codec cannot encode it."""
        try:
            if isinstance(value, str):
                return value.encode()
            return self._codecs.get(stream.namespace, self._others).encode(value)
        except Exception as error:
            raise PayloadInvalid(f"cannot encode {shown(value)} for stream {stream}: {_one_line(error)}") from error

    def encode_all(self, stream: StreamId, items: list[Any]) -> list[bytes | Event]:
        """Encode those of the items that are neither bytes nor events. Raises InvalidArgument."""
        kinds = set(map(type, items))
        if kinds <= {bytes, Event}:
            return items
        return [self._encode_one(stream, item) for item in items]

    def _encode_one(self, stream: StreamId, item: Any) -> bytes | Event:
        if isinstance(item, (bytes, Event)):
            return item
        if isinstance(item, (bytearray, memoryview)):
            return bytes(cast("bytes", item))
        return self.encode(stream, check_value(item))

    def decoder(self, kind: Any) -> Callable[[Event], Any]:
        """Return a function that decodes the payload of an event as a value of type `kind`.

        The function raises PayloadInvalid. Raises InvalidArgument if a codec cannot decode this type at all."""
        if kind is bytes:
            return _payload_of
        if kind is str:
            return _decoding(str, _text)
        others = _decoding(kind, _decoder(self._others, kind))
        if not self._codecs:
            return others
        decoders = {name: _decoding(kind, _decoder(codec, kind)) for name, codec in self._codecs.items()}
        return lambda event: decoders.get(_namespace(event), others)(event)


def is_model(kind: Any) -> bool:
    """Whether a type is a pydantic model. Does not import pydantic."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def is_value(item: object) -> bool:
    """Whether an object is one value to publish, and not several."""
    kind = type(item)
    if isinstance(item, (str, Mapping, msgspec.Struct)) or hasattr(kind, "__dataclass_fields__") or is_model(kind):
        return True
    return not isinstance(item, Iterable) and not isinstance(item, _NO_PAYLOADS)


_NO_PAYLOADS = (int, float, complex, type(None), type)


def check_value(item: object) -> object:
    """Return an item that a codec may encode. Raises InvalidArgument for numbers, None and classes, which are mistakes,
    and for several items in one."""
    if not is_value(item):
        raise not_publishable(item)
    return item


def not_publishable(item: object) -> InvalidArgument:
    """Return the error for something that cannot be published."""
    return InvalidArgument(
        f"publish bytes, str, Event, or an instance of a struct, model, dataclass or dict, not {shown(item)}"
    )


def _codec(given: object) -> Codec:
    if given is None:
        return _NAMED["json"]
    found = given
    if isinstance(given, str):
        module, colon, name = given.partition(":")
        found = _NAMED.get(given)
        if colon:
            try:
                found = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as error:
                raise InvalidArgument(f"codec {given!r} cannot be imported: {error}") from None
        if isinstance(found, type):
            found = found()
    if not isinstance(found, Codec) or isinstance(found, type):
        raise refused("codec", given, "'json', 'msgpack', 'module:name', or an object with encode and decoder")
    return found


def _decoder(codec: Codec, kind: Any) -> Callable[[bytes], Any]:
    try:
        return codec.decoder(kind)
    except Exception as error:
        codec_name, kind_name = type(codec).__name__, name_of(kind)
        raise InvalidArgument(f"{codec_name} cannot decode payloads as {kind_name}: {_one_line(error)}") from error


def _decoding(kind: Any, decode: Callable[[bytes], Any]) -> Callable[[Event], Any]:
    name = name_of(kind)

    def value_of(event: Event) -> Any:
        try:
            return decode(event.payload)
        except Exception as error:
            raise PayloadInvalid(f"the payload is no {name}: {_one_line(error)}") from error

    return value_of


def name_of(kind: Any) -> str:
    """Return a type as messages name it."""
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _payload_of(event: Event) -> bytes:
    return event.payload


def _text(payload: bytes) -> str:
    return payload.decode()


def _namespace(event: Event) -> str:
    return "" if event.stream is None else event.stream.namespace


def _plain(value: Any) -> Any:
    """Return a pydantic model inside of another value as a dictionary."""
    if is_model(type(value)):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"values of type {type(value).__name__} have no encoding")


def _model(kind: Any, value: Any) -> Any:
    """Return the pydantic model inside of another value."""
    if is_model(kind):
        try:
            return kind.model_validate(value)
        except ValueError as error:
            raise ValueError(_one_line(error)) from error
    raise NotImplementedError(f"values of type {name_of(kind)} have no decoding")


def _one_line(error: Exception) -> str:
    """Return the text of an error, without the payload, in one line."""
    errors = getattr(error, "errors", None)
    if errors is not None and _is_of_pydantic(error):
        found = cast("list[Mapping[str, Any]]", errors(include_input=False, include_url=False))
        return "; ".join(f"{'.'.join(map(str, each['loc'])) or 'payload'}: {each['msg']}" for each in found)
    return " ".join(str(error).split()) or type(error).__name__


def _is_of_pydantic(error: Exception) -> bool:
    """Whether pydantic refused a value."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(error, pydantic.ValidationError)
