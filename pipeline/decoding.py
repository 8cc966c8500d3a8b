"""Payloads as typed columns: JSON by Arrow's own reader, protobuf messages by the protobuf library.

A decoder is made in the driver and pickled for the executors, with everything that it needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from pyarrow import json as arrow_json

from ..streams.errors import CorruptRecord, InvalidArgument
from .options import VALUE, DecodeOptions

_PLACES = ("queue", "offset", "index")


class PayloadError(ValueError):
    """A payload does not have the expected form. `row` is the number of the first such payload."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(why)
        self.row = row


class PayloadDecoder(ABC):
    """Decodes each payload into a struct."""

    kind: pa.StructType

    @abstractmethod
    def decoded(self, payloads: pa.BinaryArray, *, fail: bool = True) -> pa.StructArray:
        """Return a struct for each payload, null if it cannot be decoded; with `fail`, raise PayloadError instead."""


class PayloadDecoding:
    """Replaces the column `payload` by `value`."""

    def __init__(self, decoder: PayloadDecoder, names: Sequence[str], *, fail: bool) -> None:
        """`names` are the requested columns. Without `fail`, the value of a payload that cannot be decoded is null."""
        self._decoder = decoder
        self._names = names
        self._fail = fail

    @property
    def reads(self) -> Sequence[str]:
        """The columns to read."""
        others = [name for name in self._names if name != VALUE]
        return ("payload", *others, *(name for name in _PLACES if name not in others))

    def with_value(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the requested columns, from the columns that were read.

        Raises CorruptRecord, naming the first event whose payload cannot be decoded.
        """
        columns = [self._values(batch) if name == VALUE else batch.column(name) for name in self._names]
        return pa.RecordBatch.from_arrays(columns, list(self._names))

    def _values(self, batch: pa.RecordBatch) -> pa.Array:
        payloads = batch.column("payload")
        try:
            return self._decoder.decoded(payloads, fail=self._fail)
        except PayloadError as error:
            queue, offset, index = (batch.column(name)[error.row].as_py() for name in _PLACES)
            raise _undecodable(queue, offset, index, error) from None


def _undecodable(queue: int, offset: int, index: int, error: PayloadError) -> CorruptRecord:
    found = CorruptRecord(queue, offset, str(error))
    told = (
        f"queue {queue}, offset {offset}, index {index}: the payload cannot be decoded ({error}); change the option "
        "'payloadSchema' or 'message', or set 'decodeErrors' to null, which gives such a payload the value null"
    )
    found.args = (told,)
    return found


# ---- JSON ------------------------------------------------------------------------------------------------------------


class JsonDecoder(PayloadDecoder):
    """JSON objects with the fields of a struct. Other fields are skipped, missing fields are null."""

    def __init__(self, kind: pa.StructType) -> None:
        """Raise InvalidArgument for a type without a form in JSON."""
        for field in kind:
            _check_json_type(field.name, field.type)
        self.kind = kind

    def decoded(self, payloads: pa.BinaryArray, *, fail: bool = True) -> pa.StructArray:
        if not len(payloads):
            return pa.array([], self.kind)
        try:
            return self._read(payloads)
        except (pa.ArrowException, msgspec.DecodeError, RecursionError) as error:
            if len(payloads) > 1:
                return self._by_halves(payloads, fail=fail)
            if fail:
                raise PayloadError(0, _one_line(str(error))) from None
            return pa.nulls(1, self.kind)

    def _by_halves(self, payloads: pa.BinaryArray, *, fail: bool) -> pa.StructArray:
        """Decode both halves by themselves: this finds the payload that fails, or a number of payloads that can be read
        at once."""
        middle = len(payloads) // 2
        first = self.decoded(payloads.slice(0, middle), fail=fail)
        try:
            second = self.decoded(payloads.slice(middle), fail=fail)
        except PayloadError as error:
            error.row += middle
            raise
        return pa.concat_arrays([first, second])

    def _read(self, payloads: pa.BinaryArray) -> pa.StructArray:
        lines: list[bytes] = payloads.to_pylist()
        joined = b"\n".join(lines)
        if joined.count(b"\n") != len(lines) - 1 or not all(map(_is_like_an_object, lines)):
            lines = [_one_object(line) for line in lines]
            joined = b"\n".join(lines)
        table = arrow_json.read_json(
            BytesIO(joined),
            arrow_json.ReadOptions(use_threads=False, block_size=len(joined) + 1),
            arrow_json.ParseOptions(explicit_schema=pa.schema(list(self.kind)), unexpected_field_behavior="ignore"),
        )
        # No object continues on the next line, because each line begins with { and ends with }, and JSON allows nothing
        # between } and {. So another number of rows means that a line has several objects.
        if table.num_rows != len(lines):
            raise pa.ArrowInvalid("it has more than one JSON object")
        values = pa.concat_arrays(table.to_struct_array().chunks).cast(self.kind)
        values.validate(full=True)  # the reader takes any bytes for text
        return values


def _is_like_an_object(line: bytes) -> bool:
    return line[:1] == b"{" and line[-1:] == b"}"


def _one_object(payload: bytes) -> bytes:
    """Return a JSON object on one line. Raises DecodeError, RecursionError."""
    if _is_like_an_object(payload) and b"\n" not in payload:
        return payload
    line = msgspec.json.format(payload, indent=-1)
    if line[:1] != b"{":
        raise msgspec.DecodeError("it is not a JSON object")
    return line


def _check_json_type(path: str, kind: pa.DataType) -> None:
    if pa.types.is_struct(kind):
        for field in kind:
            _check_json_type(f"{path}.{field.name}", field.type)
    elif pa.types.is_list(kind):
        _check_json_type(path, kind.value_type)
    elif not (
        pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind) or pa.types.is_string(kind) or pa.types.is_timestamp(kind)
    ):  # fmt: skip
        raise InvalidArgument(f"option 'payloadSchema': {path} has a type that JSON cannot express: use STRING")


# ---- protobuf --------------------------------------------------------------------------------------------------------


class ProtobufDecoder(PayloadDecoder):
    """Messages of one type, from a descriptor set."""

    def __init__(self, descriptor_set: bytes, message: str) -> None:
        """Raise InvalidArgument for bytes that are not a descriptor set, or for a set without this message."""
        self._set = descriptor_set
        self._message = message
        self.kind = _struct(self._type.DESCRIPTOR, ())

    def __getstate__(self) -> dict[str, Any]:
        """Classes of messages cannot be pickled."""
        return {"_set": self._set, "_message": self._message, "kind": self.kind}

    @cached_property
    def _type(self) -> type[Message]:
        pool = descriptor_pool.DescriptorPool()
        try:
            for file in descriptor_pb2.FileDescriptorSet.FromString(self._set).file:
                pool.Add(file)  # pyright: ignore[reportUnknownMemberType]
            return message_factory.GetMessageClass(pool.FindMessageTypeByName(self._message))
        except (DecodeError, TypeError) as error:
            raise InvalidArgument(
                f"option 'descriptor': the file is not a descriptor set with all its imports ({_one_line(str(error))}):"
                " make it with protoc --include_imports --descriptor_set_out=FILE"
            ) from None
        except KeyError:
            raise InvalidArgument(
                f"option 'message': the descriptor set has no message {self._message!r}: name it with its package"
            ) from None

    def decoded(self, payloads: pa.BinaryArray, *, fail: bool = True) -> pa.StructArray:
        parse, value_of = self._type.FromString, _message_value(self._type.DESCRIPTOR)
        values: list[Any] = []
        for row, payload in enumerate(payloads.to_pylist()):
            try:
                values.append(value_of(parse(payload)))
            except (DecodeError, ValueError) as error:
                if fail:
                    raise PayloadError(row, f"it is not a {self._message}: {_one_line(str(error))}") from None
                values.append(None)
        return pa.array(values, self.kind)


_SCALARS: dict[int, pa.DataType] = {
    FieldDescriptor.CPPTYPE_INT32: pa.int32(),
    FieldDescriptor.CPPTYPE_INT64: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT32: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT64: pa.decimal128(20, 0),
    FieldDescriptor.CPPTYPE_DOUBLE: pa.float64(),
    FieldDescriptor.CPPTYPE_FLOAT: pa.float32(),
    FieldDescriptor.CPPTYPE_BOOL: pa.bool_(),
    FieldDescriptor.CPPTYPE_ENUM: pa.string(),
}
_TIME = "google.protobuf.Timestamp"
_Getter = Callable[[Any], Any]


def _struct(message: Any, above: tuple[str, ...]) -> pa.StructType:
    if message.full_name in above:
        raise InvalidArgument(f"option 'message': {message.full_name} contains itself, which a column cannot")
    above = (*above, message.full_name)
    return pa.struct([(field.name, _field_type(field, above)) for field in message.fields])


def _field_type(field: Any, above: tuple[str, ...]) -> pa.DataType:
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return pa.map_(_one_type(key, above), _one_type(value, above))
    one = _one_type(field, above)
    return pa.list_(one) if field.is_repeated else one


def _one_type(field: Any, above: tuple[str, ...]) -> pa.DataType:
    if field.message_type is not None:
        if field.message_type.full_name == _TIME:
            return pa.timestamp("us", "UTC")
        return _struct(field.message_type, above)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return pa.binary() if field.type == FieldDescriptor.TYPE_BYTES else pa.string()
    return _SCALARS[field.cpp_type]


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _message_value(message: Any) -> _Getter:
    """Return the function that makes a row of a message."""
    getters = {field.name: _field_value(field) for field in message.fields}
    return lambda found: {name: value_of(found) for name, value_of in getters.items()}


def _field_value(field: Any) -> _Getter:
    name, one = field.name, _one_value(field)
    if _is_map(field):
        of_value = _one_value(field.message_type.fields_by_name["value"])
        return lambda found: [(key, of_value(value)) for key, value in getattr(found, name).items()]
    if field.is_repeated:
        return lambda found: [one(value) for value in getattr(found, name)]
    if field.has_presence:
        return lambda found: one(getattr(found, name)) if found.HasField(name) else None
    return lambda found: one(getattr(found, name))


def _one_value(field: Any) -> _Getter:
    if field.message_type is not None:
        if field.message_type.full_name == _TIME:
            return _microseconds
        return _message_value(field.message_type)
    if field.enum_type is not None:
        names: Mapping[int, str] = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        return lambda found: names.get(found, str(found))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and field.type != FieldDescriptor.TYPE_BYTES:
        return _text
    return lambda found: found


def _microseconds(found: Any) -> int:
    time_us = found.seconds * 1_000_000 + found.nanos // 1000
    if not -(1 << 63) <= time_us < 1 << 63:
        raise ValueError(f"a timestamp of {found.seconds} seconds is outside of Spark's range")
    return time_us


def _text(found: Any) -> str:
    """Return a text. In messages of proto2, a string that is not UTF-8 comes as bytes: raise ValueError."""
    if not isinstance(found, str):
        raise ValueError("a string is not UTF-8")  # noqa: TRY004 (of a value, not of a program)
    return found


# ---- options ---------------------------------------------------------------------------------------------------------


def decoder_of(decode: DecodeOptions, value: pa.StructType) -> PayloadDecoder:
    """Return the decoder. `value` is the type of the column in Spark's schema. Raise InvalidArgument."""
    return JsonDecoder(value) if decode.form == "json" else protobuf_decoder(decode)


def protobuf_decoder(decode: DecodeOptions) -> ProtobufDecoder:
    """Raise InvalidArgument if the file cannot be read, or has no such message."""
    try:
        content = Path(decode.descriptor).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"option 'descriptor': {decode.descriptor} cannot be read: {error.strerror}") from None
    return ProtobufDecoder(content, decode.message)


def value_ddl(decode: DecodeOptions) -> str:
    """Return the type of the column in Spark's DDL."""
    return f"STRUCT<{decode.schema}>" if decode.form == "json" else ddl_of(protobuf_decoder(decode).kind)


def ddl_of(kind: pa.DataType) -> str:
    """Return a type in Spark's DDL."""
    if pa.types.is_struct(kind):
        return f"STRUCT<{', '.join(f'`{field.name}` {ddl_of(field.type)}' for field in kind)}>"
    if pa.types.is_map(kind):
        return f"MAP<{ddl_of(kind.key_type)}, {ddl_of(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"ARRAY<{ddl_of(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision}, {kind.scale})"
    return _DDL[kind]


_DDL = {
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.float32(): "FLOAT",
    pa.bool_(): "BOOLEAN",
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.timestamp("us", "UTC"): "TIMESTAMP",
}


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
