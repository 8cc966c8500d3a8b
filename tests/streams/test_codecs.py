"""Payloads of Python types."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import pydantic
import pytest

from headrace import Event, EventBatch, InvalidArgument, JsonCodec, MsgpackCodec, PayloadInvalid, StreamId
from headrace.streams.codecs import Codecs
from headrace.streams.handlers import Handler
from headrace.streams.publishing import grouped, listed

STREAM = StreamId("orders", "42")
AT = datetime(2026, 11, 27, 1, 30, tzinfo=UTC)


class StructOrder(msgspec.Struct):
    id: int
    at: datetime


class ModelOrder(pydantic.BaseModel):
    id: int
    at: datetime


@dataclass
class DataOrder:
    id: int
    at: datetime


class Basket(msgspec.Struct):
    orders: list[ModelOrder]


class Reversed:
    """A codec of a user."""

    def encode(self, value: Any, /) -> bytes:
        return str(value).encode()[::-1]

    def decoder(self, kind: Any, /) -> Callable[[bytes], Any]:
        return lambda payload: kind(payload[::-1])


class Unusable:
    def encode(self, value: Any, /) -> bytes:
        return b""


def delivered(payload: bytes, stream: StreamId = STREAM) -> Event:
    return Event(payload, stream=stream)


BASKET = Basket([ModelOrder(id=1, at=AT)])
VALUES = [StructOrder(1, AT), ModelOrder(id=1, at=AT), DataOrder(1, AT), {"id": 1}, "Grüße", b"\xff", BASKET]


@pytest.mark.parametrize("codec", ["json", "msgpack", JsonCodec(), MsgpackCodec(), {"*": "msgpack"}, None])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_the_same_after_encoding_and_decoding(codec: Any, value: Any) -> None:
    codecs = Codecs(codec)
    [payload] = listed(STREAM, value, codecs)
    assert isinstance(payload, bytes)
    assert codecs.decoder(type(value))(delivered(payload)) == value


def test_text_and_bytes_are_payloads_as_they_are() -> None:
    codecs = Codecs("msgpack")
    assert listed(STREAM, "Grüße", codecs) == ["Grüße".encode()]
    assert listed(STREAM, [b"x", bytearray(b"y"), "z"], codecs) == [b"x", b"y", b"z"]


def test_json_is_what_other_programs_expect() -> None:
    assert listed(STREAM, DataOrder(1, AT), Codecs()) == [b'{"id":1,"at":"2026-11-27T01:30:00Z"}']


def test_several_values_are_several_events() -> None:
    orders = [StructOrder(1, AT), Event(b"2"), {"id": 3}]
    assert listed(STREAM, iter(orders), Codecs()) == [b'{"id":1,"at":"2026-11-27T01:30:00Z"}', Event(b"2"), b'{"id":3}']
    pairs = [(STREAM, {"id": 1}), (StreamId("n", "k"), "two"), (STREAM, b"3")]
    assert grouped(pairs, Codecs()) == {STREAM: [b'{"id":1}', b"3"], StreamId("n", "k"): [b"two"]}


def test_namespaces_may_have_codecs_of_their_own() -> None:
    codecs = Codecs({"orders": "msgpack", "words": Reversed()})
    words, others = StreamId("words", "w"), StreamId("others", "o")
    assert listed(STREAM, {"id": 1}, codecs) == [b"\x81\xa2id\x01"]
    assert listed(words, {"id": 1}, codecs) == [b"}1 :'di'{"]
    assert listed(others, {"id": 1}, codecs) == [b'{"id":1}']
    decode = codecs.decoder(dict)
    assert decode(delivered(b"\x81\xa2id\x01")) == decode(delivered(b'{"id":1}', others)) == {"id": 1}


@pytest.mark.parametrize(
    ("kind", "payload", "message"),
    [
        (StructOrder, b'{"id": "one", "at": "2026-11-27"}', "the payload is no StructOrder: Expected `int`, got `str`"),
        (StructOrder, b"{", "the payload is no StructOrder: Input data was truncated"),
        (
            ModelOrder,
            b'{"id": 1, "at": "secret"}',
            "the payload is no ModelOrder: at: Input should be a valid datetime",
        ),
        (Basket, b'{"orders": [{"id": 1}]}', "the payload is no Basket: at: Field required"),
        (DataOrder, b"{}", "the payload is no DataOrder: Object missing required field `id`"),
        (dict, b"[]", "the payload is no dict: Expected `object`, got `array`"),
        (str, b"\xff", "the payload is no str: 'utf-8' codec can't decode"),
    ],
)
def test_a_payload_of_another_type_is_invalid(kind: Any, payload: bytes, message: str) -> None:
    with pytest.raises(PayloadInvalid, match=message) as caught:
        Codecs().decoder(kind)(delivered(payload))
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("value", [5, 1.5, True, None, StructOrder, [[b"x"]], [5], memoryview(b"x"), bytearray(b"x")])
def test_numbers_classes_and_lists_of_lists_are_no_values(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="publish bytes, str, Event"):
        listed(STREAM, value, Codecs())


def test_a_value_that_the_codec_cannot_encode_is_refused_with_its_stream() -> None:
    with pytest.raises(PayloadInvalid, match=r"cannot encode \{'a': 1j\} for stream orders/42: values of type complex"):
        listed(STREAM, {"a": 1j}, Codecs())


def test_a_value_that_has_no_bytes_is_refused_however_it_is_nested() -> None:
    with pytest.raises(PayloadInvalid, match=r"cannot encode '\\udcff' for stream orders/42: .*surrogates not allowed"):
        listed(STREAM, "\udcff", Codecs())
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(PayloadInvalid, match="cannot encode <dict> for stream orders/42"):
        listed(STREAM, {"a": nested}, Codecs())
    with pytest.raises(InvalidArgument, match=r"publish bytes, str, Event, .*, not <list>"):
        listed(STREAM, nested, Codecs())


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("yaml", "codec is 'yaml': expected 'json', 'msgpack', 'module:name'"),
        (5, "codec is 5"),
        (Unusable(), "codec is"),
        ({"orders": "xml"}, "codec is 'xml'"),
        ("nowhere:Codec", "codec 'nowhere:Codec' cannot be imported: No module named 'nowhere'"),
        ("json:nothing", "codec 'json:nothing' cannot be imported"),
    ],
)
def test_a_wrong_codec_is_refused(codec: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Codecs(codec)


def test_a_codec_can_be_named_by_its_module() -> None:
    codecs = Codecs(f"{__name__}:Reversed")
    assert listed(STREAM, {"a": 1}, codecs) == [b"}1 :'a'{"]


def test_a_type_that_the_codec_cannot_decode_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="JsonCodec cannot decode payloads as "):
        Codecs().decoder(dict[int, StructOrder] | list[int] | StructOrder | DataOrder)


# ---- handlers --------------------------------------------------------------------------------------------------------


def called(handler: Any, event: Event) -> Any:
    """Return what the handler was given, and returned."""
    on_event = Handler.of(handler, batch=False, codecs=Codecs()).on_event
    assert on_event is not None
    call: Callable[[Event], Awaitable[Any]] = on_event
    return asyncio.run(_wait(call(event)))


async def _wait(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def on_struct(order: StructOrder) -> Any:
    return order


async def on_model_and_event(order: ModelOrder, event: Event) -> Any:
    return order.id, event.payload


async def on_bytes(payload: bytes) -> Any:
    return payload


async def on_dict(payload: dict[str, int], event: Event) -> Any:
    return payload, event.stream


async def on_union(payload: StructOrder | None) -> Any:
    return payload


async def on_event(event: Event) -> Any:
    return event


async def on_anything(event: Any) -> Any:
    return event


class OnNext:
    async def on_next(self, order: StructOrder) -> Any:
        return order


def test_the_annotation_decides_what_a_handler_takes() -> None:
    text = b'{"id":1,"at":"2026-11-27T01:30:00Z"}'
    event = delivered(text)
    assert called(on_struct, event) == called(OnNext(), event) == called(on_union, event) == StructOrder(1, AT)
    assert called(on_model_and_event, event) == (1, text)
    assert called(on_bytes, event) is text
    assert called(on_dict, delivered(b'{"a":1}')) == ({"a": 1}, STREAM)
    for handler in (on_event, on_anything):
        assert called(handler, event) is event


def test_bytes_cost_one_call_and_no_copy() -> None:
    handler = Handler.of(on_bytes, batch=False, codecs=Codecs()).on_event
    assert handler is not None
    coroutine = handler(delivered(b"x"))
    assert inspect.iscoroutine(coroutine)  # the user's own: nothing is awaited around it
    assert coroutine.cr_code is on_bytes.__code__
    coroutine.close()


async def on_two(order: StructOrder, other: int) -> None: ...


async def on_three(order: StructOrder, event: Event, other: int) -> None: ...


async def on_batch(batch: EventBatch) -> None: ...


@pytest.mark.parametrize(
    ("handler", "batch", "message"),
    [
        (on_three, False, "on_three.* has the wrong arguments: expected StructOrder, or StructOrder, event"),
        (
            on_struct,
            True,
            r"on_struct\(order.*with batch=True a handler takes an EventBatch, not StructOrder",
        ),
        (on_batch, False, "on_batch.*takes a batch: add batch=True"),
    ],
)
def test_other_arguments_are_refused(handler: Any, *, batch: bool, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Handler.of(handler, batch=batch)


def test_a_type_that_is_not_known_is_refused() -> None:
    class Local(msgspec.Struct):
        id: int

    async def handle(order: Local) -> None: ...

    with pytest.raises(InvalidArgument, match="the type 'Local' is not known when the handler is declared"):
        Handler.of(handle, batch=False)
