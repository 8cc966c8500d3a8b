"""A gRPC server as one would write it first: for every consumer it makes a message of the next events, one field per
event, and serialises it. Its events are in memory; it keeps no position and waits for no acknowledgement.

`python -m benchmarks.fan_reference PORT EVENTS SIZE BATCH` serves. The saving of headrace's encoded batches is
measured against it: it has the same batches, the same library and the same client underneath.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from .processes import Job, together
from .results import Result
from .servers import LOOPBACK, Server
from .worker import StartingGate

SERVICE, METHOD = "reference.Fan", "Consume"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
CONNECT_S = 30.0


def messages() -> tuple[Any, Any]:
    """The classes `Event` (payload, time) and `Events` (repeated Event)."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="reference.proto", package="reference", syntax="proto3")
    event = file.message_type.add(name="Event")
    event.field.add(name="payload", number=1, type=kinds.TYPE_BYTES, label=kinds.LABEL_OPTIONAL)
    event.field.add(name="timestamp_us", number=2, type=kinds.TYPE_SFIXED64, label=kinds.LABEL_OPTIONAL)
    events = file.message_type.add(name="Events")
    field = events.field.add(name="events", number=1, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_REPEATED)
    field.type_name = ".reference.Event"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # pyright: ignore[reportUnknownMemberType]
    made = message_factory.GetMessages([file], pool=pool)
    return made["reference.Event"], made["reference.Events"]


class FanServer(Server):
    """The reference in a process of its own."""

    name = "fan-reference"

    def __init__(self, *, events: int, size: int, batch: int) -> None:
        super().__init__()
        self._numbers = (events, size, batch)

    def command(self) -> Sequence[str]:
        return (sys.executable, "-m", __spec__.name, str(self.port), *map(str, self._numbers))

    def ping(self) -> bool:
        return b"serving" in (self.directory / "server.log").read_bytes()


def fan_out(*, events: int, size: int, batch: int, consumers: int) -> Result:
    """From the call of `consumers` consumers until each of them has read every event."""
    with FanServer(events=events, size=size, batch=batch) as server:
        args = {"address": server.address, "events": events, "consumers": consumers}
        outcome = together([Job("consumers", f"{__name__}:consume", args)], server=server)
    return outcome.to_result(events=events, size=size)


def consume(gate: StartingGate, *, address: str, events: int, consumers: int) -> None:
    """The consumers, in one process, with a connection each."""
    asyncio.run(_consume(gate, address, events, consumers))


async def _consume(gate: StartingGate, address: str, events: int, consumers: int) -> None:
    _, parts = messages()
    options = [*UNLIMITED, ("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(consumers)]
    try:
        await asyncio.wait_for(asyncio.gather(*(channel.channel_ready() for channel in channels)), CONNECT_S)
        gate.wait()
        counts = await asyncio.gather(*(_read_all(channel, parts.FromString) for channel in channels))
        gate.done()
    finally:
        for channel in channels:
            await channel.close()
    if counts != [events] * consumers:
        raise RuntimeError(f"{counts} events came, of {events:,} each")


async def _read_all(channel: Any, decode: Any) -> int:
    call = channel.unary_stream(f"/{SERVICE}/{METHOD}", response_deserializer=decode)(b"")
    count = 0
    while (message := await call.read()) is not grpc.aio.EOF:
        count += len([event.payload for event in message.events])
    return count


async def _serve(port: int, events: int, size: int, batch: int) -> None:
    event, parts = messages()
    stored = [(os.urandom(size), time.time_ns() // 1000) for _ in range(batch)]
    backlog = [stored[: events - first] for first in range(0, events, batch)]

    async def consume(_request: Any, _context: Any) -> AsyncGenerator[Any]:
        for part in backlog:
            yield parts(events=[event(payload=payload, timestamp_us=at) for payload, at in part])

    handler = cast("Any", grpc).unary_stream_rpc_method_handler(consume, response_serializer=parts.SerializeToString)
    server = grpc.aio.server(options=UNLIMITED)
    server.add_registered_method_handlers(SERVICE, {METHOD: handler})
    server.add_insecure_port(f"{LOOPBACK}:{port}")
    await server.start()
    print("serving", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(*map(int, sys.argv[1:])))
