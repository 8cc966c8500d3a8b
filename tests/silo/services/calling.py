"""A silo in the test's process, and a client that knows no more of it than the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import Message

from headrace.proto.v1 import cluster_pb2, events_pb2, publisher_pb2, subscriptions_pb2
from headrace.server.access import Authenticator, NoTokens, Permission, new_token
from headrace.server.config import GrpcConfig
from headrace.server.connection_times import CONNECTION_TIMES, ConnectionTimes
from headrace.server.grpc_server import serving
from headrace.server.methods import ServiceMethod
from headrace.silo.config import ProviderConfig, SiloConfig
from headrace.silo.host import Silo
from headrace.silo.service_limits import SERVICE_LIMITS, ServiceLimits
from headrace.store.control_store import ControlStore
from headrace.store.datadir import open_data_directory
from tests.serving import SERVING
from tests.silo.clusters import clustered

# For the whole run: else what gRPC has collected last waits for its thread to end, in the middle of another test.
grpc.aio.init_grpc_aio()

_M = TypeVar("_M", bound=Message)

PUBLISH = "headrace.v1.PublisherService/Publish"
PUBLISH_STREAM = "headrace.v1.PublisherService/PublishStream"
SUBSCRIPTIONS = "headrace.v1.SubscriptionService"
CLUSTER = "headrace.v1.ClusterService"


class Refused(Exception):
    """A call that failed."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        trailers = dict(error.trailing_metadata())
        self.status = error.code().name
        self.code = trailers.get("headrace-code")
        self.retry_after_ms = trailers.get("headrace-retry-after-ms")
        self.details = error.details() or ""
        super().__init__(f"{self.status} ({self.code}): {self.details}")


class Stream:
    """Both directions of an open call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, message: Message | bytes) -> None:
        """Raises Refused if the call has failed already."""
        try:
            await self._call.write(encoded(message))
        except grpc.aio.AioRpcError as error:
            raise Refused(error) from None

    async def read(self, kind: type[_M]) -> _M | None:
        """The next message, None at the end. Raises Refused."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise Refused(error) from None
        return None if message is grpc.aio.EOF else kind.FromString(message)

    async def done_writing(self) -> None:
        await self._call.done_writing()

    def cancel(self) -> None:
        self._call.cancel()


class Caller:
    """A client of one channel."""

    def __init__(self, channel: grpc.aio.Channel, token: str | None = None) -> None:
        self.channel: Any = channel
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    async def ask(self, method: str, request: Message | bytes, kind: type[_M], **options: Any) -> _M:
        """Send one request and return the response. Raise Refused if the silo refuses it."""
        call = self.channel.unary_unary(f"/{method}")
        try:
            return kind.FromString(await call(encoded(request), metadata=self._metadata, **options))
        except grpc.aio.AioRpcError as error:
            raise Refused(error) from None

    def responses(self, method: str, request: Message | bytes) -> Stream:
        call = self.channel.unary_stream(f"/{method}")
        return Stream(call(encoded(request), metadata=self._metadata))

    def stream(self, method: str) -> Stream:
        call = self.channel.stream_stream(f"/{method}")
        return Stream(call(metadata=self._metadata))

    async def publish(self, *batches: events_pb2.EventBatch, **fields: Any) -> Sequence[publisher_pb2.Receipt]:
        request = publisher_pb2.PublishRequest(batches=batches, **fields)
        return (await self.ask(PUBLISH, request, publisher_pb2.PublishResponse)).receipts

    async def create(self, name: str, selector: str, **fields: Any) -> bool:
        definition = subscriptions_pb2.SubscriptionDefinition(name=name, selector=selector, **fields)
        request = subscriptions_pb2.CreateSubscriptionRequest(definition=definition)
        kind = subscriptions_pb2.CreateSubscriptionResponse
        return (await self.ask(f"{SUBSCRIPTIONS}/CreateSubscription", request, kind)).created

    async def get(self, name: str) -> subscriptions_pb2.Subscription:
        request = subscriptions_pb2.GetSubscriptionRequest(name=name)
        kind = subscriptions_pb2.GetSubscriptionResponse
        return (await self.ask(f"{SUBSCRIPTIONS}/GetSubscription", request, kind)).subscription

    async def describe(self) -> cluster_pb2.Silo:
        request = cluster_pb2.DescribeClusterRequest()
        kind = cluster_pb2.DescribeClusterResponse
        (silo,) = (await self.ask(f"{CLUSTER}/DescribeCluster", request, kind)).cluster.silos
        return silo


def encoded(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def batch(stream: str, *payloads: bytes, **fields: Any) -> events_pb2.EventBatch:
    """Make a batch as a client in another language does."""
    namespace, _, key = stream.partition("/")
    sizes = [len(payload) for payload in payloads]
    return events_pb2.EventBatch(namespace=namespace, key=key, sizes=sizes, payload=b"".join(payloads), **fields)


@asynccontextmanager
async def connecting(
    address: str, token: str | None = None, credentials: grpc.ChannelCredentials | None = None
) -> AsyncGenerator[Caller]:
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    channel = (
        grpc.aio.insecure_channel(address, options)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options)
    )
    async with channel:
        yield Caller(channel, token)


@asynccontextmanager
async def opened(
    data: Path | None,
    *,
    provider: Mapping[str, Any] | None = None,
    drain_s: float = 10.0,
    service_limits: ServiceLimits = SERVICE_LIMITS,
    **grpc_options: Any,
) -> AsyncGenerator[Silo]:
    """A silo that serves gRPC on a free port."""
    chosen: dict[str, Any] = {"queues": 2, **(provider or {})}
    config = SiloConfig(
        data=None if data is None else str(data),
        drain_s=drain_s,
        grpc=_config(grpc_options),
        providers={"default": ProviderConfig(**chosen)},
    )
    if SERVING.silos == 1:
        async with Silo.opened(config, service_limits) as silo:
            yield silo
        return
    drain_s = min(drain_s, 1.0)  # a queue that moves waits for events that a test leaves unacknowledged
    async with clustered(msgspec.structs.replace(config, drain_s=drain_s), SERVING.silos) as silos:
        yield silos[0]


class Offered(Caller):
    """A client of a server of the test's own, which runs until `stop` is set, or the test ends."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        super().__init__(channel)
        self.address = address
        self.stop = asyncio.Event()
        self.stopped = asyncio.Event()


@asynccontextmanager
async def offering(
    *methods: ServiceMethod,
    authenticator: Authenticator | None = None,
    drain_s: float = 10.0,
    times: ConnectionTimes = CONNECTION_TIMES,
    **options: Any,
) -> AsyncGenerator[Offered]:
    """A server with these methods alone, and a client of it."""
    async with AsyncExitStack() as server:
        chosen = authenticator or NoTokens()
        served = serving(_config(options), chosen, lambda _: methods, drain_s=drain_s, times=times)
        address = await server.enter_async_context(served)
        async with connecting(address) as caller:
            offered = Offered(caller.channel, address)
            ending = asyncio.create_task(_end(server, offered), name="the server's end")
            try:
                yield offered
            finally:
                offered.stop.set()
                await ending


async def _end(server: AsyncExitStack, offered: Offered) -> None:
    await offered.stop.wait()
    await server.aclose()
    offered.stopped.set()


def _config(options: Mapping[str, Any]) -> GrpcConfig:
    chosen: dict[str, Any] = {"port": 0, "native": SERVING.native, **options}
    return GrpcConfig(**chosen)


class Allowed(NamedTuple):
    """The rights of a token, as patterns of namespaces."""

    publish: Sequence[str] = ()
    subscribe: Sequence[str] = ()
    manage: Sequence[str] = ()


async def make_tokens(data: Path, **allowed: Allowed) -> dict[str, str]:
    """Tokens by name, in the data directory of a silo that is to be opened."""
    directory = await asyncio.to_thread(open_data_directory, data)
    store = await ControlStore.open(directory.control_db)
    tokens: dict[str, str] = {}
    for name, each in allowed.items():
        permissions = {permission: getattr(each, permission.value) for permission in Permission}
        made = new_token(name, permissions, 0)
        await store.add_token(made.record)
        tokens[name] = made.text
    await store.aclose()
    return tokens
