"""A provider in another process. It has the methods of a provider in this process: see `headrace.silo.provider`.

async with Client("127.0.0.1:9465") as client:
    await client.stream("orders", "42").publish(b"paid")
    async with client.subscribe("printer", "orders/*") as consumer:
        async for batch in consumer:
            ...
            await batch.ack()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import NoReturn, Self, cast

from ..proto.v1 import publisher_pb2 as pb
from ..streams import tracing
from ..streams.arguments import check_call, check_flag, check_methods, check_seconds, check_text, refused
from ..streams.codecs import CodecOption, Codecs, Publishable
from ..streams.errors import InvalidArgument, PayloadTooLarge
from ..streams.events import Event, EventBatch
from ..streams.identity import SequenceToken, StreamId
from ..streams.layout import NOT_RECORDED
from ..streams.publishing import (
    MAX_REQUEST_BATCHES,
    ProducerSequence,
    Receipt,
    check_producer,
    check_sequence,
    check_stream,
    encoded,
    grouped,
    listed,
    scheduled,
)
from ..streams.stream import Stream
from .connection import GrpcTransport, Tls
from .consuming_client import ConsumingClient
from .management import parsed
from .native import NativeTransport
from .publishing import PublishPipeline, frame, receipts_of
from .stream_provider import StreamProvider

UNKNOWN_PLACE = SequenceToken(-1)
"""The token that `publish` returns if the events were stored before an outage, and the silo has forgotten their
position."""
MAX_REQUEST_BYTES = 4 << 20
"""Limit of one request with a sequence."""


@check_methods(StreamProvider)
class Client(ConsumingClient):
    """A provider of a silo, over gRPC. Open it with `async with`; it belongs to that event loop.

    When the silo cannot be reached, calls wait and try again for `timeout_s`, and then raise Unavailable. Published
    events are stored once and in order, also over an outage: see `publish`.
    """

    @check_call
    def __init__(
        self,
        address: str,
        *,
        provider: str = "default",
        token: str | None = None,
        tls: Tls | bool | None = None,
        insecure: bool = False,
        direct: bool = True,
        connect_timeout_s: float = 10.0,
        timeout_s: float = 30.0,
        linger_s: float = 0.0,
        codec: CodecOption | None = None,
    ) -> None:
        """`address` is host:port, or several with commas between: when one does not answer, the next is tried. `tls` is
        True, or a `Tls` with certificates. A token is sent over an unencrypted connection only within this machine, or
        with `insecure=True`. Without `direct`, consumers open no sessions to other silos of a cluster: the silo at
        `address` is their gateway.

        `connect_timeout_s` is for opening, `timeout_s` for every call afterwards, in seconds. `linger_s` is how long a
        request waits for more events, in seconds. With 0 it has the events published in one turn of the loop.

        `codec` encodes published values, and decodes them for handlers: "json", which is the default, "msgpack", the
        "module:name" of a `Codec`, or a `Codec`; or a mapping from namespaces to these, with "*" for other namespaces.

        Raises InvalidArgument.
        """
        for name, text in (("address", address), ("provider", provider)):
            check_text(name, text)
        if token is not None:
            check_text("token", token)
        if tls is not None and not isinstance(cast("object", tls), bool | Tls):
            raise refused("tls", tls, "True, False, None or a Tls, such as Tls(ca='ca.pem')")
        for name, flag in (("insecure", insecure), ("direct", direct)):
            check_flag(name, flag)
        for name, value in (("connect_timeout_s", connect_timeout_s), ("timeout_s", timeout_s)):
            check_seconds(name, value, above_zero=True)
        check_seconds("linger_s", linger_s)
        grpc = GrpcTransport(address, token=token, tls=tls, insecure=insecure)
        self._transport = NativeTransport(grpc, direct=direct)
        super().__init__(self._transport, provider, timeout_s, Codecs(codec))
        self._connect_timeout_s = connect_timeout_s
        self._publishing = PublishPipeline(self._transport, provider, timeout_s=timeout_s, linger_s=linger_s)

    async def __aenter__(self) -> Self:
        self._transport.check_loop()
        try:
            await self._transport.open(self._connect_timeout_s)
        except BaseException:
            await self._transport.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __enter__(self) -> NoReturn:
        raise InvalidArgument("a Client is opened with `async with`: without asyncio, use `with SyncClient(...)`")

    def __exit__(self, *_: object) -> None: ...

    async def aclose(self) -> None:
        """Close the consumers, wait for events that are being published for as long as their callers would, and close
        the connection. Idempotent. Afterwards every call raises Closed."""
        self._transport.check_loop()
        try:
            await self.close_consumers()  # first: handlers that end may still publish
            await self._publishing.aclose()
        finally:
            await self._transport.aclose()

    # ---- publishing ------------------------------------------------------------------------------------------------

    def stream(self, namespace: str | StreamId, key: str | None = None) -> Stream:
        """A handle on a stream, by namespace and key or by id."""
        if isinstance(namespace, StreamId):
            return Stream(namespace, self)
        if key is None:
            raise InvalidArgument("a stream has a namespace and a key: client.stream('orders', '42')")
        return Stream(StreamId(namespace, key), self)

    async def publish(
        self,
        stream: StreamId,
        events: Publishable | Iterable[Publishable],
        *,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> SequenceToken:
        """Publish to one stream, in order: see `Stream.publish`. Events of concurrent callers share requests.

        Returns the token of the first event; `UNKNOWN_PLACE` if it was stored before an outage and the silo has
        forgotten its position.

        After an outage the events are sent again, and stored once. Raises Unavailable after `timeout_s`: then they may
        be stored or not. If nothing is stored, the message says so. They are never stored after events that are
        published later.
        """
        check_stream(stream)
        trace = b""
        if tracing.active is not None:
            if tracing.active.records():
                given = scheduled(listed(stream, events, self.codecs), delay, priority)
                with tracing.active.publishing(self._provider, stream, len(given)) as trace:
                    return (await self._publish_grouped({stream: given}, trace))[0].token or UNKNOWN_PLACE
            trace = NOT_RECORDED
        publishing = self._publishing
        deadline = await publishing.wait_for_space() if publishing.full else None
        if type(events) is bytes and delay is None and priority is None:
            batches = [EventBatch.of_payload(stream, events, trace)]
        else:
            batches = encoded(stream, scheduled(listed(stream, events, self.codecs), delay, priority), trace)
        receipts = await publishing.publish(batches, deadline)
        return receipts[0].token or UNKNOWN_PLACE

    async def publish_many(
        self, items: Iterable[tuple[StreamId, Publishable]], *, sequence: ProducerSequence | None = None
    ) -> Sequence[Receipt]:
        """Publish to several streams at once, in order within each stream. Return one receipt per stored batch.

        With `sequence`, a retry stores nothing twice, and a call stores all its events or none. Such a call is a
        request of its own, of at most 4 MiB. Its order among other events that are published meanwhile is not defined.
        """
        if sequence is not None:
            check_sequence(sequence)
            check_producer(sequence.producer)
        by_stream = grouped(items, self.codecs)
        if sequence is None and not by_stream:
            return []
        if tracing.active is None or not tracing.active.records():
            trace = b"" if tracing.active is None else NOT_RECORDED
            return await self._publish_grouped(by_stream, trace, sequence)
        with tracing.active.publishing(self._provider, None, sum(map(len, by_stream.values()))) as trace:
            return await self._publish_grouped(by_stream, trace, sequence)

    async def _publish_grouped(
        self,
        by_stream: Mapping[StreamId, list[bytes | Event]],
        trace: bytes,
        sequence: ProducerSequence | None = None,
    ) -> Sequence[Receipt]:
        deadline = await self._publishing.wait_for_space() if sequence is None and self._publishing.full else None
        batches = [batch for stream, events in by_stream.items() for batch in encoded(stream, events, trace)]
        if sequence is not None:
            return await self._publish_once(batches, sequence)
        return await self._publishing.publish(batches, deadline)

    async def last_sequence(self, producer: str) -> int:
        """The highest number stored for a producer of `publish_many` with sequences; 0 if there is none."""
        check_producer(producer, "producer")
        request = pb.GetProducerRequest(provider=self._provider, producer=producer).SerializeToString()
        answer = await self._transport.call("PublisherService/GetProducer", request, timeout_s=self._timeout_s)
        return parsed(pb.GetProducerResponse, answer).number

    async def flush(self) -> None:
        """Return when all events published before are stored or have failed. Failures are raised to their callers.

        Publishes whose caller was cancelled do not count: their events may be stored later, or not at all.
        """
        self._transport.check_loop()
        await self._publishing.flush()

    async def _publish_once(self, batches: Sequence[EventBatch], sequence: ProducerSequence) -> Sequence[Receipt]:
        head = pb.PublishRequest(provider=self._provider, sequence=pb.ProducerSequence(**sequence._asdict()))
        request = b"".join([head.SerializeToString(), *[part for batch in batches for part in frame(batch)]])
        if len(request) > MAX_REQUEST_BYTES:
            raise PayloadTooLarge("a request with a sequence", len(request), MAX_REQUEST_BYTES)
        if len(batches) > MAX_REQUEST_BATCHES:
            raise InvalidArgument(
                f"one sequence publishes to at most {MAX_REQUEST_BATCHES:,} streams, not {len(batches):,}: use several"
            )
        answer = await self._transport.call("PublisherService/Publish", request, timeout_s=self._timeout_s)
        return receipts_of(parsed(pb.PublishResponse, answer))
