"""A provider in another process. It looks as one in this process does: see `headrace.silo.provider`.

async with Client("127.0.0.1:9465") as client:
    await client.stream("orders", "42").publish(b"paid")
    async with client.subscribe("printer", "orders/*") as consumer:
        async for batch in consumer:
            ...
            await batch.ack()
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NoReturn, Self

from ...proto.v1 import publisher_pb2 as pb
from ..errors import InvalidArgument, PayloadTooLarge
from ..events import Event, EventBatch
from ..identity import SequenceToken, StreamId
from ..publishing import (
    MAX_REQUEST_BATCHES,
    ProducerSequence,
    Receipt,
    check_stream,
    encoded,
    grouped,
    listed,
    scheduled,
)
from ..stream import Stream
from .connection import Connection, Tls
from .consuming import Consuming
from .management import parsed
from .publishing import Publishing, frame, receipts_of

UNKNOWN_PLACE = SequenceToken(-1)
"""What publishing returns for events that were stored before an outage, where the silo no longer knows where."""
MAX_REQUEST_BYTES = 4 << 20
"""Limit of one request with a sequence."""


class Client(Consuming):
    """A provider of a silo, over gRPC. Open it with `async with`; it belongs to that event loop.

    When the silo cannot be reached, calls wait and try again for `timeout_s`, and then raise Unavailable. What is
    published is stored once and in order also then: see `publish`.
    """

    def __init__(
        self,
        address: str,
        *,
        provider: str = "default",
        token: str | None = None,
        tls: Tls | bool | None = None,
        insecure: bool = False,
        connect_timeout_s: float = 10.0,
        timeout_s: float = 30.0,
        linger_s: float = 0.0,
    ) -> None:
        """`address` is host:port, or several with commas between: when one does not answer, the next is tried. `tls` is
        True, or a `Tls` with certificates. A token goes over an unencrypted connection only within this machine, or
        with `insecure=True`.

        `connect_timeout_s` is for opening, `timeout_s` for every call afterwards, in seconds. `linger_s` is how long
        what is published waits for company; with 0, what is published in one turn of the loop travels together.

        Raises InvalidArgument.
        """
        for name, value in (("connect_timeout_s", connect_timeout_s), ("timeout_s", timeout_s)):
            if not value > 0:
                raise InvalidArgument(f"{name} is a number of seconds above 0, not {value!r}")
        super().__init__(Connection(address, token=token, tls=tls, insecure=insecure), provider, timeout_s)
        self._connect_timeout_s = connect_timeout_s
        self._publishing = Publishing(self._connection, provider, timeout_s=timeout_s, linger_s=linger_s)

    async def __aenter__(self) -> Self:
        self._connection.check_loop()
        try:
            await self._connection.open(self._connect_timeout_s)
        except BaseException:
            await self._connection.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __enter__(self) -> NoReturn:
        raise InvalidArgument("a Client is opened with `async with`: without asyncio, use `with SyncClient(...)`")

    def __exit__(self, *_: object) -> None: ...

    async def aclose(self) -> None:
        """Close its consumers, wait for what is being published, as long as its callers would, and close. Idempotent;
        afterwards everything raises Closed."""
        self._connection.check_loop()
        try:
            await self.close_consumers()  # first: handlers that end may still publish
            await self._publishing.aclose()
        finally:
            await self._connection.aclose()

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
        events: bytes | Event | Iterable[bytes | Event],
        *,
        delay: timedelta | None = None,
        priority: int | None = None,
    ) -> SequenceToken:
        """Publish to one stream, in order: see `Stream.publish`. What concurrent callers publish travels together.

        Returns the token of the first event; `UNKNOWN_PLACE` where it was stored before an outage and the silo does not
        know any more where.

        Over outages the events are sent again, and stored once. Unavailable after `timeout_s`: they may be stored, or
        not; the message says where they are not. They are not stored after events that are published later.
        """
        check_stream(stream)
        publishing = self._publishing
        deadline = await publishing.room() if publishing.crowded else None
        if type(events) is bytes and delay is None and priority is None:
            batches = [EventBatch.of(stream, [events])]
        else:
            batches = encoded(stream, scheduled(listed(events), delay, priority))
        receipts = await publishing.publish(batches, deadline)
        return receipts[0].token or UNKNOWN_PLACE

    async def publish_many(
        self, items: Iterable[tuple[StreamId, bytes | Event]], *, sequence: ProducerSequence | None = None
    ) -> Sequence[Receipt]:
        """Publish to several streams at once, in order within each. One receipt per stored batch.

        With `sequence`, a retry stores nothing twice, and one call is all or nothing: it is a request of its own, so it
        is limited to 4 MiB, and it is not in order with what is published otherwise meanwhile.
        """
        by_stream = grouped(items)
        if sequence is not None:
            batches = [batch for stream, events in by_stream.items() for batch in encoded(stream, events)]
            return await self._publish_once(batches, sequence)
        if not by_stream:
            return []
        deadline = await self._publishing.room() if self._publishing.crowded else None
        batches = [batch for stream, events in by_stream.items() for batch in encoded(stream, events)]
        return await self._publishing.publish(batches, deadline)

    async def last_sequence(self, producer: str) -> int:
        """The highest number stored for a producer of `publish_many` with sequences, 0 where there is none."""
        request = pb.GetProducerRequest(provider=self._provider, producer=producer).SerializeToString()
        answer = await self._connection.call("PublisherService/GetProducer", request, timeout_s=self._timeout_s)
        return parsed(pb.GetProducerResponse, answer).number

    async def flush(self) -> None:
        """Return when everything that was published before is stored or has failed, of which its callers are told."""
        self._connection.check_loop()
        await self._publishing.flush()

    async def _publish_once(self, batches: Sequence[EventBatch], sequence: ProducerSequence) -> Sequence[Receipt]:
        head = pb.PublishRequest(provider=self._provider, sequence=pb.ProducerSequence(**sequence._asdict()))
        request = b"".join([head.SerializeToString(), *[part for batch in batches for part in frame(batch)]])
        if len(request) > MAX_REQUEST_BYTES:
            raise PayloadTooLarge("what is published with one sequence", len(request), MAX_REQUEST_BYTES)
        if len(batches) > MAX_REQUEST_BATCHES:
            raise InvalidArgument(
                f"one sequence publishes to at most {MAX_REQUEST_BATCHES:,} streams, not {len(batches):,}: use several"
            )
        answer = await self._connection.call("PublisherService/Publish", request, timeout_s=self._timeout_s)
        return receipts_of(parsed(pb.PublishResponse, answer))
