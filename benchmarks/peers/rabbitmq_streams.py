"""RabbitMQ Streams over rstream: batches of raw messages with confirms; a consumer that stores its offset.

RabbitMQ confirms a message once it is written, and does not sync it to disk.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from ..servers import LOOPBACK, Server, find_program, free_port
from .peer import Peer, PeerConsumer, Producer

if TYPE_CHECKING:
    from rstream import ConfirmationStatus, MessageContext
    from rstream import Consumer as StreamConsumer
    from rstream import Producer as StreamProducer

STREAM, REFERENCE = "events", "consumers"
USER = "guest"
UNCONFIRMED_BATCHES = 10
UNCONFIRMED_PACED = 10_000
CREDIT_CHUNKS = 10
DEBIAN_SCRIPTS = "/usr/lib/rabbitmq/bin"
"""Debian's program on PATH insists on the user rabbitmq and its fixed folders; the one it calls does not."""


class RabbitStreams(Peer):
    name = "RabbitMQ Streams"
    client = f"{__name__}:client"
    requires = ("rstream",)

    def server(self) -> Server:
        return RabbitServer()


class RabbitServer(Server):
    """RabbitMQ with the stream plugin alone, and an Erlang port mapper of its own."""

    name = "rabbitmq-server"

    def __init__(self) -> None:
        super().__init__()
        self._mapper_port = free_port()
        self._distribution_port = free_port()

    def command(self) -> Sequence[str]:
        program = find_program("rabbitmq-server", debian_package="rabbitmq-server", folders=[DEBIAN_SCRIPTS])
        # The port mapper is a child here, so that it ends with the rest; RabbitMQ would leave it behind as a daemon.
        script = f'epmd -port {self._mapper_port} -address {LOOPBACK} & exec "$0"'
        return ("sh", "-c", script, program)

    def environment(self) -> Mapping[str, str]:
        folder = str(self.directory)
        return {
            "HOME": folder,
            "ERL_EPMD_PORT": str(self._mapper_port),
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "RABBITMQ_NODENAME": f"headrace{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_MNESIA_BASE": folder,
            "RABBITMQ_LOG_BASE": folder,
            "RABBITMQ_CONF_ENV_FILE": f"{folder}/none",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
        }

    def prepare(self) -> None:
        settings = {
            "listeners.tcp": "none",
            "stream.listeners.tcp.1": self.address,
            "stream.advertised_host": LOOPBACK,
            "stream.advertised_port": str(self.port),
            "log.console": "true",
            "log.file": "false",
        }
        lines = (f"{key} = {value}\n" for key, value in settings.items())
        (self.directory / "rabbitmq.conf").write_text("".join(lines))
        (self.directory / "enabled_plugins").write_text("[rabbitmq_stream].\n")

    def ping(self) -> bool:
        """Create the stream, as a client does: the port is open before the rest is."""
        socket.create_connection((LOOPBACK, self.port), timeout=1).close()
        return asyncio.run(_create_stream(self.port))


async def _create_stream(port: int) -> bool:
    from rstream import Producer as StreamProducer  # noqa: PLC0415 (only in the process that uses it)

    async with StreamProducer(LOOPBACK, port, username=USER, password=USER, max_retries=1) as producer:
        await producer.create_stream(STREAM, exists_ok=True)
    return True


class _Client:
    @asynccontextmanager
    async def producer(self, address: str, *, batch: int, paced: bool = False) -> AsyncGenerator[Producer]:
        from rstream import Producer as StreamProducer  # noqa: PLC0415

        host, _, port = address.partition(":")
        async with StreamProducer(host, int(port), username=USER, password=USER) as producer:
            yield _Producer(producer, limit=UNCONFIRMED_PACED if paced else UNCONFIRMED_BATCHES * batch)

    @asynccontextmanager
    async def consumer(
        self, address: str, *, batch: int, paced: bool = False, number: int = 0
    ) -> AsyncGenerator[PeerConsumer]:
        from rstream import Consumer as StreamConsumer  # noqa: PLC0415
        from rstream import ConsumerOffsetSpecification, OffsetType  # noqa: PLC0415

        host, _, port = address.partition(":")
        async with StreamConsumer(host, int(port), username=USER, password=USER) as consumer:
            mailbox = _Consumer(consumer, f"{REFERENCE}-{number}", batch)
            await consumer.subscribe(
                STREAM,
                cast("Any", mailbox.put),
                offset_specification=ConsumerOffsetSpecification(OffsetType.FIRST, None),
                initial_credit=CREDIT_CHUNKS,
            )
            yield mailbox


class _Producer:
    def __init__(self, producer: StreamProducer, limit: int) -> None:
        self._producer = producer
        self._limit = limit
        self._unconfirmed = 0
        self._refused: ConfirmationStatus | None = None
        self._confirmed = asyncio.Event()

    async def send(self, payloads: Sequence[bytes]) -> None:
        await self._until_at_most(self._limit - len(payloads))
        self._unconfirmed += len(payloads)
        await self._producer.send_batch(STREAM, payloads, on_publish_confirm=self._on_confirm)

    async def flush(self) -> None:
        await self._until_at_most(0)

    async def _until_at_most(self, unconfirmed: int) -> None:
        while self._unconfirmed > unconfirmed:
            self._confirmed.clear()
            await self._confirmed.wait()
        if self._refused:
            raise RuntimeError(f"RabbitMQ refused an event: {self._refused}")

    def _on_confirm(self, status: ConfirmationStatus) -> None:
        self._unconfirmed -= 1
        if not status.is_confirmed:
            self._refused = status
        self._confirmed.set()


class _Consumer:
    """Collects the callback's messages; stores the offset after each `batch` events."""

    def __init__(self, consumer: StreamConsumer, reference: str, batch: int) -> None:
        self._consumer = consumer
        self._reference = reference
        self._batch = batch
        self._payloads: list[bytes] = []
        self._offset = 0
        self._unstored = 0
        self._arrived = asyncio.Event()

    def put(self, payload: bytes, context: MessageContext) -> None:
        self._payloads.append(payload)
        self._offset = context.offset
        self._arrived.set()

    async def receive(self) -> Sequence[bytes]:
        await self._arrived.wait()
        self._arrived.clear()
        payloads, self._payloads = self._payloads, []
        self._unstored += len(payloads)
        if self._unstored >= self._batch:
            await self._store()
        return payloads

    async def finish(self) -> None:
        if self._unstored:
            await self._store()

    async def _store(self) -> None:
        self._unstored = 0
        await self._consumer.store_offset(STREAM, self._reference, self._offset)


client = _Client()
