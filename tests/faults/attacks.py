"""Attacks on a silo's port, as a program of its own: `python -m tests.faults.attacks HOST:PORT SEED SECONDS`.

It attacks for that many seconds, in several ways at a time; with 0, once in each way. It prints one JSON document: how
calls ended, and the calls with an outcome that no call should have.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from headrace.client.packets import HEAD, PacketKind
from headrace.proto.v1 import cluster_pb2, consumer_pb2, events_pb2, publisher_pb2, reader_pb2, subscriptions_pb2
from tests.faults.mutations import NAMES, absurd, mutated
from tests.server.native_calls import GREETING, beginning, native_port, packet

SPARE = b"\x0a\x05spare"
"""Put behind any request that begins with a provider's name, this names the provider spare: the last one holds."""
AT_A_TIME = 3
ANSWER_S = 30.0
"""How long an answer is waited for; then the attacker hangs up."""
WRITE_S = 5.0
"""How long the requests of one call may take to write. A silo reads no more of a call whose answers are not read."""
ATTACK_S = 60.0
"""How long one attack may take."""
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Target(NamedTuple):
    """A method of the silo."""

    name: str
    request: type[Message]
    asks_much: bool
    """Many requests in one call."""
    answers_much: bool
    apart: bool
    """It would disturb honest clients, so it is only called for the provider spare."""


def _targets() -> list[Target]:
    files = (publisher_pb2, consumer_pb2, subscriptions_pb2, reader_pb2, cluster_pb2, health_pb2)
    found: list[Target] = []
    for file in files:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                if method.name == "DrainSilo":
                    continue  # it would end the others' sessions, in order
                name = f"{service.full_name}/{method.name}"
                kind = method.input_type._concrete_class
                apart = method.name in ("StopAgents", "StartAgents")
                found.append(Target(name, kind, method.client_streaming, method.server_streaming, apart))
    return found


TARGETS = _targets()


class Ended(NamedTuple):
    """How a call ended."""

    method: str
    status: str
    code: str
    details: str
    request: bytes


class Attacker:
    """Attacks from one machine, with numbers of its own."""

    def __init__(self, address: str, port: int, seed: int, *, write_s: float = WRITE_S) -> None:
        self.address = address
        self._write_s = write_s
        self.native_port = port
        self.rng = random.Random(seed)
        self.statuses: Counter[str] = Counter()
        self.suspicious: list[Ended] = []
        """Calls that ended as none should."""

    def note(self, ended: Ended) -> None:
        if ended.details in BY_CLIENT:
            return
        self.statuses[f"{ended.method.rpartition('/')[2]} {ended.status}"] += 1
        if is_suspicious(ended):
            self.suspicious.append(ended)

    # ---- bytes that are no gRPC ------------------------------------------------------------------------------------

    async def garbage(self) -> None:
        """Bytes on the port, some after a start that looks well."""
        rng = self.rng
        hello = bytes.fromhex("1603010200010001fc0303") + rng.randbytes(20)
        settings = b"\0\0\0\4\0\0\0\0\0"
        beginnings = (b"", hello, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"POST / HTTP/1.0\r\n", HTTP2,
                      HTTP2 + settings, HTTP2[:10], b"\0" * 30)  # fmt: skip
        await asyncio.gather(*(self._send(start + rng.randbytes(rng.choice((0, 10, 3000)))) for start in beginnings))

    async def frames(self) -> None:
        """HTTP/2 frames of all kinds, with lengths and streams that do not fit."""
        rng = self.rng
        data = HTTP2 + b"\0\0\0\4\0\0\0\0\0"
        for _ in range(20):
            size = rng.choice((0, 1, 4, 5, 8, 100))
            length = rng.choice((size, size, size, size + 1, 1 << 20))
            head = length.to_bytes(3, "big") + bytes(
                (rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 99)), rng.getrandbits(8))
            )
            data += head + rng.choice((0, 1, 1, 2, 3, (1 << 31) - 1)).to_bytes(4, "big") + rng.randbytes(size)
        await self._send(data)

    async def _send(self, data: bytes, port: int | None = None) -> None:
        with suppress(OSError):
            reader, writer = await self._connect(port)
            try:
                writer.write(data)
                async with asyncio.timeout(0.3):
                    await writer.drain()
                    while await reader.read(65536):
                        pass
            except TimeoutError:
                pass
            finally:
                writer.close()

    async def silence(self, count: int = 300) -> None:
        """Connections that say nothing."""
        opened = await asyncio.gather(*(self._connect() for _ in range(count)), return_exceptions=True)
        await asyncio.sleep(0.2)
        for each in opened:
            if not isinstance(each, BaseException):
                each[1].close()

    async def _connect(self, port: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To gRPC, or to another port of the silo. Raises OSError."""
        host, _, grpc_port = self.address.rpartition(":")
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.open_connection(host, port or int(grpc_port))

    # ---- the native protocol ---------------------------------------------------------------------------------------

    async def native_garbage(self) -> None:
        """Bytes on the native port, and packets of all kinds with lengths, calls and bodies that do not fit."""
        rng = self.rng
        beginnings = (b"", GREETING, HTTP2, GREETING * 2)
        await asyncio.gather(*(self._native(start + rng.randbytes(rng.choice((0, 10, 3000)))) for start in beginnings))
        for _ in range(10):
            packets = [packet(rng.choice((*range(11), 99)), rng.choice((0, 1, 1, 2, 3, (1 << 32) - 1)),
                              rng.randbytes(rng.choice((0, 1, 4, 5, 20)))) for _ in range(10)]  # fmt: skip
            packets.insert(0, beginning(1, rng.choice(TARGETS).name))
            if rng.random() < 0.3:
                packets.append(HEAD.pack(rng.choice((5 << 20, (1 << 32) - 1)), 1, rng.choice((1, 2))))
            await self._native(GREETING + b"".join(packets))

    async def native_silence(self, count: int = 100) -> None:
        """Connections that say nothing, or only their greeting."""
        opened = await asyncio.gather(*(self._connect(self.native_port) for _ in range(count)), return_exceptions=True)
        for index, each in enumerate(opened):
            if not isinstance(each, BaseException) and index % 2:
                each[1].write(GREETING)
        await asyncio.sleep(0.2)
        for each in opened:
            if not isinstance(each, BaseException):
                each[1].close()

    async def native_flood(self) -> None:
        """Calls that are cancelled as soon as they begin, and a client that reads no answers."""
        target = self.rng.choice([target for target in TARGETS if not target.apart])
        calls = [
            beginning(n, target.name) + packet(PacketKind.CANCEL, n) for n in range(1, self.rng.choice((300, 5000)))
        ]
        await self._native(GREETING + b"".join(calls))
        await self._native(
            GREETING + b"".join(beginning(n, _TARGET["Publish"].name, bytes(10_000)) for n in range(1, 300))
        )

    async def native_requests(self) -> None:
        """Call every method with an absurd request, on one connection, and note how the calls end."""
        rng = self.rng
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            reader, writer = await self._connect(self.native_port)
            writer.write(GREETING)
            calls: dict[int, tuple[Target, bytes]] = {}
            for number, target in enumerate(TARGETS, 1):
                request = self._bytes(target)
                calls[number] = target, request
                if target.asks_much:
                    messages = [
                        packet(PacketKind.MESSAGE, number, self._bytes(target)) for _ in range(rng.choice((0, 3)))
                    ]
                    writer.write(beginning(number, target.name) + b"".join(messages) + packet(PacketKind.END, number))
                else:
                    writer.write(beginning(number, target.name, request))
            try:
                async with asyncio.timeout(1.0):
                    while calls:
                        size, number, kind = HEAD.unpack(await reader.readexactly(HEAD.size))
                        body = await reader.readexactly(size)
                        if kind == PacketKind.ERROR:
                            self.note(_native_end(*calls.pop(number), body))
                        elif kind in (PacketKind.END, PacketKind.ANSWER):
                            del calls[number]
            finally:
                writer.close()

    async def _native(self, data: bytes) -> None:
        await self._send(data, self.native_port)

    # ---- requests --------------------------------------------------------------------------------------------------

    async def requests(self) -> None:
        """Call every method with bytes that are no request, or with an absurd request."""
        async with self._channel() as channel:
            targets = [target for target in TARGETS for _ in range(3)]
            await asyncio.gather(*(self._call(channel, target) for target in targets))

    async def unknown(self) -> None:
        """Methods that are not there, and some of them with the other kind of call."""
        rng = self.rng
        names = ("", "x", "headrace.v1.ConsumerService/", "headrace.v1.ConsumerService/Nothing", "a/b/c", "\x7f/\t")
        async with self._channel() as channel:
            target = Target(rng.choice(names), consumer_pb2.PullRequest, False, False, False)
            await self._call(channel, target)
            known = rng.choice(TARGETS)
            await self._call(channel, known._replace(asks_much=not known.asks_much))

    async def oversized(self) -> None:
        """Messages above every limit."""
        async with self._channel() as channel:
            for size in (5 << 20, 10 << 20):
                target = self.rng.choice([target for target in TARGETS if not target.answers_much])
                await self._unary(channel, target, b"\xfa\x3f" + _length(size) + bytes(size))

    async def flood(self) -> None:
        """As many small requests as fit into a moment."""
        async with self._channel() as channel:
            target = self.rng.choice([target for target in TARGETS if not target.answers_much and not target.apart])
            await asyncio.gather(
                *(self._unary(channel, target, b"") for _ in range(self.rng.choice((300, 1000, 1000, 4000))))
            )

    def _bytes(self, target: Target) -> bytes:
        rng = self.rng
        encoded = absurd(target.request, rng).SerializeToString()
        if rng.random() < 0.3:
            others = [absurd(self.rng.choice(TARGETS).request, rng).SerializeToString() for _ in range(2)]
            encoded = mutated(encoded, [encoded, *others], rng)
        return _apart(target, encoded) if target.apart else encoded

    async def _call(self, channel: Any, target: Target) -> None:
        if target.asks_much:
            await self._converse(channel, target, [self._bytes(target) for _ in range(self.rng.choice((0, 1, 5)))])
        elif target.answers_much:
            call = channel.unary_stream(f"/{target.name}")(self._bytes(target))
            await self._read(call, target, b"", 0.2)
        else:
            await self._unary(channel, target, self._bytes(target))

    async def _unary(self, channel: Any, target: Target, request: bytes) -> None:
        patience_s = 0.5 if target.name.endswith(LONG) else ANSWER_S
        call = channel.unary_unary(f"/{target.name}")(request, timeout=patience_s)
        with suppress(grpc.aio.AioRpcError):
            await call
        self.note(await _ended(target, call, request))

    async def _converse(self, channel: Any, target: Target, requests: Sequence[bytes]) -> None:
        call = channel.stream_stream(f"/{target.name}")()
        sent = b""
        try:
            async with asyncio.timeout(self._write_s):
                with suppress(Exception):  # gRPC raises various errors if the call ends during a write
                    for sent in requests:
                        await call.write(sent)
                    if self.rng.random() < 0.5:
                        await call.done_writing()
        except TimeoutError:
            call.cancel()
            return
        await self._read(call, target, sent, 0.5)

    async def _read(self, call: Any, target: Target, request: bytes, patience_s: float) -> None:
        """Until it ends, or is hung up on."""
        with suppress(grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(patience_s):
                while await call.read() is not grpc.aio.EOF:
                    pass
        if call.done():
            self.note(await _ended(target, call, request))
        else:
            call.cancel()

    # ---- consumers -------------------------------------------------------------------------------------------------

    async def sessions(self, count: int = 30) -> None:
        """Consumers that come, say things in any order, and drop their connections."""
        async with self._channel() as channel:
            await self._unary(channel, _TARGET["Publish"], _some_events(self.rng))
            await asyncio.gather(*(self._session(channel) for _ in range(count)))

    async def _session(self, channel: Any) -> None:
        rng, kind = self.rng, consumer_pb2.SubscribeRequest
        opening = kind(
            open=consumer_pb2.Open(
                definition=_definition(rng.choice(NAMES)),
                consumer=rng.choice((*NAMES, "")),
                session_timeout_ms=rng.choice((0, 500, 1000)),
                direct=rng.random() < 0.5,
            ),
            credit=consumer_pb2.Credit(
                events=rng.choice((0, 1, (1 << 64) - 1)), bytes=rng.choice((0, 1, (1 << 64) - 1))
            ),
        )
        target = _TARGET["Subscribe"]
        rest = [self._bytes(target) for _ in range(rng.choice((0, 1, 3)))]
        reports = [_useless_report(rng, queue) for queue in (0, 1, 2, (1 << 32) - 1)]
        more = (
            kind(close=True).SerializeToString(),
            kind(reports=reports).SerializeToString(),
            kind(reclaim=True, credit=consumer_pb2.Credit(events=1, bytes=1 << 20)).SerializeToString(),
            opening.SerializeToString(),
            b"",
        )
        script = [opening.SerializeToString(), *rest, *rng.sample(more, rng.randint(0, len(more)))]
        if rng.random() < 0.3:
            rng.shuffle(script)
        await self._converse(channel, target, script)

    async def hoarder(self) -> None:
        """A consumer that takes all it can get, and acknowledges nothing."""
        async with self._channel() as channel:
            call = channel.stream_stream(f"/{_TARGET['Subscribe'].name}")()
            opening = consumer_pb2.Open(definition=_definition("fuzz-all", "*/*"), session_timeout_ms=1000)
            credit = consumer_pb2.Credit(events=(1 << 64) - 1, bytes=(1 << 64) - 1)
            request = consumer_pb2.SubscribeRequest(open=opening, credit=credit).SerializeToString()
            with suppress(grpc.aio.AioRpcError):
                await call.write(request)  # it is small: it does not wait for the silo to read
            await self._read(call, _TARGET["Subscribe"], request, 2.0)

    def _channel(self) -> Any:
        return grpc.aio.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)])

    @property
    def attacks(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """The common ones oftener."""
        return (
            self.garbage, self.frames, self.silence, self.requests, self.requests, self.requests, self.unknown,
            self.oversized, self.flood, self.sessions, self.sessions, self.hoarder,
            self.native_garbage, self.native_silence, self.native_flood, self.native_requests, self.native_requests,
        )  # fmt: skip


def _apart(target: Target, encoded: bytes) -> bytes:
    """The request, for the provider spare."""
    with suppress(DecodeError):
        request: Any = target.request.FromString(encoded + SPARE)
        if request.provider != "spare":  # something before it has swallowed it
            return SPARE
    return encoded + SPARE


_TARGET = {target.name.rpartition("/")[2]: target for target in TARGETS}


def _definition(name: str, selector: str = "fuzz/*") -> subscriptions_pb2.SubscriptionDefinition:
    mode = {"fuzz-1": subscriptions_pb2.MODE_BOUND, "fuzz-2": subscriptions_pb2.MODE_BROADCAST}.get(name)
    return subscriptions_pb2.SubscriptionDefinition(
        name=name,
        selector=selector,
        mode=mode or subscriptions_pb2.MODE_SHARED,
        start=subscriptions_pb2.Start(earliest=True),
    )


def _useless_report(rng: random.Random, queue: int) -> consumer_pb2.QueueReport:
    """Results of thousands of events that the consumer does not hold."""
    return consumer_pb2.QueueReport(
        queue=queue,
        epoch=rng.choice((0, 1, 2, (1 << 64) - 1)),
        generation=rng.choice((0, 0, 1)),
        number=rng.choice((0, 1, (1 << 64) - 1)),
        acknowledgements=[consumer_pb2.Acknowledgement(offset=n, index=n % 5) for n in range(3000)],
        unconfirmed=[
            consumer_pb2.Unconfirmed(namespace="fuzz", key=str(n % 50), offset=n, index=n % 5, count=1)
            for n in range(3000)
        ],
        released=[consumer_pb2.Released(offset=n) for n in range(1000)],
    )


def _some_events(rng: random.Random) -> bytes:
    batches = [
        events_pb2.EventBatch(namespace="fuzz", key=str(rng.randrange(50)), sizes=[100] * 20, payload=bytes(2000))
        for _ in range(100)
    ]
    return publisher_pb2.PublishRequest(batches=batches).SerializeToString()


def _length(size: int) -> bytes:
    return bytes((size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14 & 0x7F | 0x80, size >> 21))


# ---- how calls end ---------------------------------------------------------------------------------------------------

EXPECTED = {
    "OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "ABORTED", "RESOURCE_EXHAUSTED",
}  # fmt: skip
BY_GRPC = {"UNIMPLEMENTED", "RESOURCE_EXHAUSTED"}
"""Said by gRPC itself: there is no such method, or the message is far too large."""
BY_CLIENT = {"Internal error from Core", "Locally cancelled by application!"}
"""Said by the attacker's own gRPC: it hung up, or wrote when the call had ended."""
STATUS_NAMES = {status.value[0]: status.name for status in grpc.StatusCode}
LONG = ("Pull", "AwaitCaughtUp", "DescribeCluster")
"""They may wait for longer than the attacker does: the last one comes in floods, which wait for themselves."""


def is_suspicious(ended: Ended) -> bool:
    method = ended.method.rpartition("/")[2]
    if ended.status == "DEADLINE_EXCEEDED":
        return method not in LONG
    if ended.status == "UNAVAILABLE":
        return ended.code == "" or method != "Subscribe"  # a consumer that was not heard
    if ended.status not in EXPECTED:
        return ended.status not in BY_GRPC
    return ended.status != "OK" and not ended.code and ended.status not in BY_GRPC


async def _ended(target: Target, call: Any, request: bytes) -> Ended:
    trailers: dict[str, Any] = dict(await call.trailing_metadata() or ())
    status, details = await call.code(), await call.details() or ""
    return Ended(target.name, status.name, trailers.get("headrace-code", ""), details, request)


def _native_end(target: Target, request: bytes, body: bytes) -> Ended:
    at = 2 + body[1]
    status = STATUS_NAMES[body[0]]
    return Ended(target.name, status, body[2:at].decode(), body[at:].decode(), request)


# ---- the program -----------------------------------------------------------------------------------------------------


async def attack(address: str, seed: int, seconds: float) -> dict[str, Any]:
    seeds = random.Random(seed)
    port = await native_port(address)
    attackers = [Attacker(address, port, seeds.getrandbits(32)) for _ in range(AT_A_TIME)]
    if not seconds:
        await asyncio.gather(*(_run_attack(each) for each in dict.fromkeys(attackers[0].attacks)))
    ends = asyncio.get_running_loop().time() + seconds
    await asyncio.gather(*(_go_on(attacker, ends) for attacker in attackers))
    statuses = sum((attacker.statuses for attacker in attackers), Counter[str]())
    suspicious = [repr(ended)[:2000] for attacker in attackers for ended in attacker.suspicious]
    return {"statuses": statuses, "suspicious": suspicious}


async def _go_on(attacker: Attacker, ends: float) -> None:
    while asyncio.get_running_loop().time() < ends:
        await _run_attack(attacker.rng.choice(attacker.attacks))


async def _run_attack(attack: Callable[[], Awaitable[None]]) -> None:
    """Raise AssertionError if the attack does not end."""
    try:
        async with asyncio.timeout(ATTACK_S):
            await attack()
    except TimeoutError as error:
        raise AssertionError(f"{attack!r} has not ended after {ATTACK_S:g} s") from error


if __name__ == "__main__":
    json.dump(asyncio.run(attack(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))), sys.stdout)
