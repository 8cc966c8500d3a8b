"""Payloads that do not fit their schema: an error that names them, or null, and never the value of another payload."""

from collections.abc import Sequence

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, timestamp_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.decoding import JsonDecoder, PayloadDecoder, PayloadError, ProtobufDecoder

JSON = JsonDecoder(pa.struct([("a", pa.int64()), ("s", pa.string())]))
NOT_JSON = (
    pytest.param(b"", id="nothing"),
    pytest.param(b"[]", id="no object"),
    pytest.param(b'{"a":1}{"a":2}', id="two objects"),
    pytest.param(b'{"a":1,"a":2}', id="a field twice"),
    pytest.param(b'{"s":"\xff\xfe"}', id="no UTF-8"),
    pytest.param(b'{"a":1}\0', id="a zero byte"),
    pytest.param(b'{"a":99999999999999999999}', id="a number that is too large"),
    pytest.param(b'\n{"a":' * 100_000, id="nested too deeply"),
)
PIECES = st.sampled_from([b'{"a":', b"{", b"}", b"1", b'{"a":1}', b"[", b"]", b",", b'"', b" ", b"\n"])


def payloads(*values: bytes) -> pa.BinaryArray:
    return pa.array(values, pa.binary())


def protobuf() -> ProtobufDecoder:
    """Return a decoder of messages of proto2, which checks no strings.

    A message has a string, a map of strings and a timestamp.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name="m.proto", package="x", syntax="proto2", dependency=["google/protobuf/timestamp.proto"]
    )
    message, kind = file.message_type.add(name="M"), FieldDescriptorProto
    message.field.add(name="s", number=1, type=kind.TYPE_STRING, label=kind.LABEL_OPTIONAL)
    message.field.add(
        name="t", number=2, type=kind.TYPE_MESSAGE, label=kind.LABEL_OPTIONAL, type_name=".google.protobuf.Timestamp"
    )
    message.field.add(name="m", number=3, type=kind.TYPE_MESSAGE, label=kind.LABEL_REPEATED, type_name=".x.M.MEntry")
    entry = message.nested_type.add(name="MEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    for number, name in enumerate(("key", "value"), 1):
        entry.field.add(name=name, number=number, type=kind.TYPE_STRING, label=kind.LABEL_OPTIONAL)
    time = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(time)
    return ProtobufDecoder(descriptor_pb2.FileDescriptorSet(file=[time, file]).SerializeToString(), "x.M")


def check_the_bad_one(decoder: PayloadDecoder, good: bytes, bad: bytes, value: object) -> None:
    with pytest.raises(PayloadError) as told:
        decoder.decoded(payloads(good, bad, good))
    assert told.value.row == 1
    assert decoder.decoded(payloads(good, bad, good), fail=False).to_pylist() == [value, None, value]


@pytest.mark.parametrize("bad", NOT_JSON)
def test_invalid_json_is_named_or_null(bad: bytes):
    check_the_bad_one(JSON, b'{"a":7}', bad, {"a": 7, "s": None})


def test_json_that_continues_in_the_next_payload_shifts_no_values():
    pieces = (b'{"x":', b'{"b":1}}', b'{"a":1}{"a":2}', b'{"a":7}')
    assert JSON.decoded(payloads(*pieces), fail=False).to_pylist() == [None, None, None, {"a": 7, "s": None}]


@given(st.lists(st.lists(PIECES, max_size=5).map(b"".join), max_size=8))
def test_a_value_is_that_of_its_own_payload(texts: Sequence[bytes]):
    alone = [JSON.decoded(payloads(text), fail=False).to_pylist()[0] for text in texts]
    assert JSON.decoded(payloads(*texts), fail=False).to_pylist() == alone


def test_an_object_may_have_space_around_it_and_several_lines():
    assert JSON.decoded(payloads(b'\n {"a":\n1} \r\n', b'{"a":2}')).field("a").to_pylist() == [1, 2]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(b"\x0a", id="cut short"),
        pytest.param(b"\x0a\x02\xff\xfe", id="a string that is no UTF-8"),
        pytest.param(b"\x1a\x07\x0a\x02\xff\xfe\x12\x01a", id="a key that is no UTF-8"),
        pytest.param(b"\x12\x0a\x08" + b"\xff" * 8 + b"\x7f", id="a timestamp out of range"),
    ],
)
def test_invalid_message_is_named_or_null(bad: bytes):
    check_the_bad_one(protobuf(), b"\x0a\x01a", bad, {"s": "a", "t": None, "m": []})
