"""Streams, queues and tokens: accepted and refused names."""

import copy
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace import InvalidArgument, QueueId, SequenceToken, StreamId
from headrace.streams.identity import MAX_NAME_BYTES, read_varint, varint

ANY_NAME = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
ROUGH_NAME = st.text(st.sampled_from("/%*?25F \0\n\x85\x9b\u2028ä東a"), max_size=12)
NAMES = ANY_NAME | ROUGH_NAME


@given(NAMES, NAMES)
@example("", "")
@example("a/b", "c/d")
@example("%2F", "%")
@example("\0", "\u2029")
def test_text_form_round_trips_and_is_one_line(namespace: str, key: str):
    stream = StreamId(namespace, key)
    text = str(stream)
    assert StreamId.parse(text) == stream
    assert (StreamId.parse(text).namespace, StreamId.parse(text).key) == (namespace, key)
    assert len(text.splitlines()) == 1
    assert not any(character < " " or "\x7f" <= character <= "\x9f" for character in text)


@pytest.mark.parametrize(
    ("namespace", "key", "text"),
    [
        ("orders", "42", "orders/42"),
        ("", "", "/"),
        ("a", "b/c", "a/b/c"),
        ("a/b", "c", "a%2Fb/c"),
        ("größe", "東京", "größe/東京"),
        ("n", "50% off?", "n/50%25 off%3F"),
        ("n", "a*b", "n/a%2Ab"),
        ("n", "two\nlines", "n/two%0Alines"),
        ("n", "\u2028", "n/%E2%80%A8"),
    ],
)
def test_text_form_is_readable(namespace: str, key: str, text: str):
    assert str(StreamId(namespace, key)) == text


@given(NAMES, NAMES, NAMES, NAMES)
@example("a", "b/c", "a/b", "c")
@example("ab", "c", "a", "bc")
def test_equality_respects_the_boundary(a: str, b: str, c: str, d: str):
    assert (StreamId(a, b) == StreamId(c, d)) == ((a, b) == (c, d))
    assert (StreamId(a, b).prefix == StreamId(c, d).prefix) == ((a, b) == (c, d))
    assert (str(StreamId(a, b)) == str(StreamId(c, d))) == ((a, b) == (c, d))


def test_equal_streams_are_one_key_of_a_dict():
    assert {StreamId("a", "b"): 1, StreamId("a", "b"): 2} == {StreamId("a", "b"): 2}


def test_copies_and_pickles_are_equal_and_small():
    stream = StreamId("orders", "42")
    assert stream.prefix
    for other in (copy.copy(stream), copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))):
        assert other == stream
        assert type(other) is StreamId
    assert b"\x0a" + b"\x06orders" not in pickle.dumps(stream)


def test_a_name_of_the_largest_size_is_accepted():
    assert StreamId("ä" * (MAX_NAME_BYTES // 2), "k" * MAX_NAME_BYTES).key


@pytest.mark.parametrize(
    ("namespace", "key", "why"),
    [
        ("n", "k" * 1025, "key has 1,025 bytes in UTF-8, the limit is 1,024"),
        ("ä" * 513, "k", "namespace has 1,026 bytes in UTF-8, the limit is 1,024"),
        ("n", "\ud800", "key has a lone surrogate"),
        (b"n", "k", "namespace is a string, not bytes"),
        ("n", None, "key is a string, not NoneType"),
        ("n", 42, "key is a string, not int"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_the_reason(namespace: str, key: str, why: str):
    with pytest.raises(InvalidArgument, match=why):
        StreamId(namespace, key)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("orders", "'orders' names no stream: write it as namespace/key"),
        ("", "names no stream"),
        ("a/50%", "has a % that begins no escape"),
        ("a/%2", "has a % that begins no escape"),
        ("%zz/a", "has a % that begins no escape"),
        ("a/%FF", "percent escapes that are not UTF-8"),
        ("a/%ED%A0%80", "percent escapes that are not UTF-8"),
        ("a/" + "k" * 1025, "key has 1,025 bytes"),
    ],
)
def test_text_that_names_no_stream_is_refused_with_the_reason(text: str, why: str):
    with pytest.raises(InvalidArgument, match=why):
        StreamId.parse(text)


@given(st.text(max_size=20))
def test_any_text_is_a_stream_or_refused(text: str):
    try:
        stream = StreamId.parse(text)
    except InvalidArgument:
        return
    assert StreamId.parse(str(stream)) == stream


@given(st.integers(0, 1 << 80), st.integers(0, 1 << 20))
def test_tokens_round_trip(offset: int, index: int):
    token = SequenceToken(offset, index)
    assert SequenceToken.parse(str(token)) == token


def test_tokens_are_ordered_by_offset_and_then_index():
    tokens = [SequenceToken(1 << 70, 5), SequenceToken(9, 1), SequenceToken(10), SequenceToken(9)]
    assert [str(token) for token in sorted(tokens)] == ["9", "9.1", "10", f"{1 << 70}.5"]


@pytest.mark.parametrize("text", ["", "-1", "1.", ".1", "1.2.3", "1.x", " 1", "1\n", "１", "9" * 5000])
def test_text_that_is_no_token_is_refused(text: str):
    with pytest.raises(InvalidArgument, match=r"is not a token: write it as OFFSET or OFFSET\.INDEX"):
        SequenceToken.parse(text)


def test_queues_are_called_by_provider_and_index():
    assert str(QueueId("flights", 3)) == "flights/3"


@pytest.mark.parametrize(
    ("value", "encoded"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (1 << 63, "80808080808080808001")]
)
def test_varints_are_those_of_protobuf(value: int, encoded: str):
    assert varint(value).hex() == encoded
    data = b"?" + varint(value) + b"?"
    assert read_varint(data, 1) == (value, len(data) - 1)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff\xff", b"\x80" * 3, b"\x80" * 9, b"\xff" * 10 + b"\x01"])
def test_a_varint_that_is_cut_short_or_too_long_is_refused(data: bytes):
    with pytest.raises(IndexError):
        read_varint(data, 0)


def test_a_limit_of_bytes_refuses_longer_varints():
    assert read_varint(b"\x80\x80\x80\x01", 0, 4) == (1 << 21, 4)
    with pytest.raises(IndexError):
        read_varint(b"\x80\x80\x80\x80\x01", 0, 4)
