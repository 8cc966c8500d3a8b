"""Handlers of 100 ms over many streams, some of which are stuck for ever: how near the others come to the ideal rate.

In the ideal each healthy stream handles an event every 100 ms. A backlog is stored first. The rate is that of a window,
after a warm-up. All options are the defaults.

The other systems do not keep the order within a key for several handlers. Their user does, or not:
- *Any order*: a pool of as many workers as there are keys. Each takes the next event. Each event of a stuck key keeps a
  worker for ever.
- *Order by hand*: one reader, a queue and a task for each key, and up to 10,000 events in memory, as many as a client
  of headrace holds. This works for one consumer only.
"""

from __future__ import annotations

import asyncio
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace import Client, Event, Provider, Start, StreamId

from .harness import Job, Result, together
from .peers.nats_jetstream import CONSUMER, SUBJECT, NatsServer
from .peers.nats_jetstream import STREAM as NATS_STREAM
from .peers.redis_streams import FIELD, GROUP
from .peers.redis_streams import STREAM as REDIS_STREAM
from .section import Run, Section, Target
from .servers import RedisServer, Server
from .silo_server import SiloServer
from .worker import StartingGate

HERE = "benchmarks.slow_handlers"
HANDLER_S = 0.1
WARM_UP_S = 2.0
CLOSE_S = 2.0
"""How long a consumer may take to stop, in seconds."""
IN_HAND = 10_000
"""Events in the memory of a consumer that keeps the order by hand."""
READ_EVENTS = 1000
IDEAL, ASYNCIO = "the ideal", "asyncio alone: tasks that sleep"
SILO, GRPC = "headrace, handlers in the silo", "headrace, handlers of a client"
ANY_ORDER, BY_HAND = "any order", "order by hand"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowSetting:
    streams: int = 1000
    stuck: int = 10
    seconds: float = 10.0
    warm_up_s: float = WARM_UP_S

    @property
    def each(self) -> int:
        """Events of a stream: enough for the whole run."""
        return round(1.5 * (self.warm_up_s + self.seconds) / HANDLER_S) + 10

    @property
    def keys(self) -> Sequence[str]:
        return [str(number) for number in range(self.streams)]


class Handling:
    """The handler, and the count of the events that it handled."""

    def __init__(self, setting: SlowSetting) -> None:
        self._setting = setting
        step = setting.streams // max(setting.stuck, 1)
        self._stuck = set(setting.keys[::step][: setting.stuck])
        self._free = asyncio.Event()
        self._began = asyncio.Event()
        self._handled = 0

    async def handle(self, key: str) -> None:
        self._began.set()
        if key in self._stuck:
            await self._free.wait()
        await asyncio.sleep(HANDLER_S)
        self._handled += 1

    async def measure(self, gate: StartingGate) -> dict[str, int]:
        """Count the events of the window. Then no stream is stuck any more, so that all can be closed."""
        await self._began.wait()
        await asyncio.sleep(self._setting.warm_up_s)
        await asyncio.to_thread(gate.wait)
        before = self._handled
        await asyncio.sleep(self._setting.seconds)
        gate.done()
        events = self._handled - before
        self._free.set()
        return {"events": events}


# ---- headrace --------------------------------------------------------------------------------------------------------


def alone(gate: StartingGate, **setting: Any) -> Mapping[str, Any]:
    return asyncio.run(_alone(gate, SlowSetting(**setting)))


async def _alone(gate: StartingGate, setting: SlowSetting) -> Mapping[str, Any]:
    handling = Handling(setting)

    async def stream(key: str) -> None:
        while True:
            await handling.handle(key)

    tasks = [asyncio.create_task(stream(key)) for key in setting.keys]
    result = await handling.measure(gate)
    for task in tasks:
        task.cancel()
    return result


def in_silo(gate: StartingGate, **setting: Any) -> Mapping[str, Any]:
    return asyncio.run(_in_silo(gate, SlowSetting(**setting)))


async def _in_silo(gate: StartingGate, setting: SlowSetting) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as data:
        async with Provider.open(data) as provider:
            return await _subscribe(gate, setting, provider)


def over_grpc(gate: StartingGate, *, address: str, **setting: Any) -> Mapping[str, Any]:
    return asyncio.run(_over_grpc(gate, address, SlowSetting(**setting)))


async def _over_grpc(gate: StartingGate, address: str, setting: SlowSetting) -> Mapping[str, Any]:
    async with Client(address) as client:
        return await _subscribe(gate, setting, client)


async def _subscribe(gate: StartingGate, setting: SlowSetting, place: Provider | Client) -> Mapping[str, Any]:
    await publish(setting, place)
    return await handle_events(gate, setting, place)


async def publish(setting: SlowSetting, place: Provider | Client) -> None:
    for _ in range(setting.each):
        await place.publish_many([(StreamId("bench", key), key.encode()) for key in setting.keys])


async def handle_events(gate: StartingGate, setting: SlowSetting, place: Provider | Client) -> Mapping[str, Any]:
    handling = Handling(setting)

    async def handler(event: Event) -> None:
        await handling.handle(event.payload.decode())

    subscription = await place.subscribe("slow", "bench/*", handler, start=Start.earliest())
    result = await handling.measure(gate)
    await subscription.close()
    return result


# ---- other systems ---------------------------------------------------------------------------------------------------


class Inbox(ABC):
    """A consumer of another system. What it receives is a key and something to acknowledge."""

    @abstractmethod
    async def publish(self, keys: Sequence[str]) -> None: ...

    @abstractmethod
    async def receive(self, most: int) -> Sequence[tuple[str, Any]]:
        """Return at most so many events, none after a silent second."""

    @abstractmethod
    async def acknowledge(self, events: Sequence[Any]) -> None: ...


class RedisInbox(Inbox):
    def __init__(self, redis: Any) -> None:
        self._redis = redis

    @classmethod
    @asynccontextmanager
    async def opened(cls, address: str) -> AsyncGenerator[Inbox]:
        from redis.asyncio import Redis  # noqa: PLC0415 (only in the process that uses it)

        host, _, port = address.partition(":")
        async with Redis(host=host, port=int(port)) as redis:
            await redis.xgroup_create(REDIS_STREAM, GROUP, "0", mkstream=True)
            yield cls(redis)

    async def publish(self, keys: Sequence[str]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.execute_command("XADD", REDIS_STREAM, "*", FIELD, key)
        await pipeline.execute()

    async def receive(self, most: int) -> Sequence[tuple[str, Any]]:
        streams = await self._redis.xreadgroup(GROUP, "one", {REDIS_STREAM: ">"}, count=most, block=1000)
        entries: Sequence[tuple[bytes, dict[bytes, bytes]]] = streams[0][1] if streams else ()
        return [(fields[FIELD].decode(), entry) for entry, fields in entries]

    async def acknowledge(self, events: Sequence[Any]) -> None:
        await self._redis.xack(REDIS_STREAM, GROUP, *events)


class NatsInbox(Inbox):
    def __init__(self, jetstream: Any, subscription: Any) -> None:
        self._jetstream = jetstream
        self._subscription = subscription

    @classmethod
    @asynccontextmanager
    async def opened(cls, address: str) -> AsyncGenerator[Inbox]:
        import nats  # noqa: PLC0415
        from nats.js import api  # noqa: PLC0415

        settings = api.ConsumerConfig(
            durable_name=CONSUMER, ack_policy=api.AckPolicy.EXPLICIT, ack_wait=600, max_ack_pending=IN_HAND
        )
        connection: Any = await nats.connect(f"nats://{address}")  # pyright: ignore[reportUnknownMemberType]
        try:
            jetstream: Any = connection.jetstream()
            await jetstream.add_consumer(NATS_STREAM, settings)
            yield cls(jetstream, await jetstream.pull_subscribe_bind(CONSUMER, NATS_STREAM))
        finally:
            await connection.close()

    async def publish(self, keys: Sequence[str]) -> None:
        await asyncio.gather(*(self._jetstream.publish(SUBJECT, key.encode()) for key in keys))

    async def receive(self, most: int) -> Sequence[tuple[str, Any]]:
        try:
            messages = await self._subscription.fetch(most, timeout=1.0)
        except TimeoutError:
            return ()
        return [(message.data.decode(), message) for message in messages]

    async def acknowledge(self, events: Sequence[Any]) -> None:
        for message in events:
            await message.ack()


INBOXES: Mapping[str, Callable[[str], AbstractAsyncContextManager[Inbox]]] = {
    "redis": RedisInbox.opened,
    "nats": NatsInbox.opened,
}
SERVERS: Mapping[str, Callable[[], Server]] = {"redis": RedisServer, "nats": NatsServer}


class Consumption(ABC):
    """Receives events, starts handlers, and acknowledges the handled events together, every few milliseconds."""

    def __init__(self, inbox: Inbox, handle: Callable[[str], Awaitable[None]], most: int) -> None:
        """`most`: events in memory."""
        self._inbox = inbox
        self._most = most
        self._handle = handle
        self._tasks = set[asyncio.Task[None]]()
        self._held = 0
        self._handled: list[Any] = []

    @abstractmethod
    def start(self, key: str, event: Any) -> None: ...

    def run_task(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def work(self, key: str, event: Any) -> None:
        await self._handle(key)
        self._held -= 1
        self._handled.append(event)

    async def receive(self) -> None:
        while True:
            space = min(self._most - self._held, READ_EVENTS)
            if space <= 0:
                await asyncio.sleep(0.001)
                continue
            for key, event in await self._inbox.receive(space):
                self._held += 1
                self.start(key, event)

    async def acknowledge(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            if self._handled:
                handled, self._handled = self._handled, []
                await self._inbox.acknowledge(handled)


class AnyOrder(Consumption):
    def start(self, key: str, event: Any) -> None:
        self.run_task(self.work(key, event))


class OrderByHand(Consumption):
    """A task for each lane, which handles one event after the other. A lane is a key."""

    def __init__(self, inbox: Inbox, handle: Callable[[str], Awaitable[None]], most: int) -> None:
        super().__init__(inbox, handle, most)
        self._waiting: dict[Any, deque[tuple[str, Any]]] = {}

    def lane(self, key: str, event: Any) -> Any:
        return key

    def start(self, key: str, event: Any) -> None:
        lane = self.lane(key, event)
        waiting = self._waiting.get(lane)
        if waiting is not None:
            waiting.append((key, event))
        else:
            self._waiting[lane] = deque([(key, event)])
            self.run_task(self._work_on(lane))

    async def _work_on(self, lane: Any) -> None:
        waiting = self._waiting[lane]
        while waiting:
            await self.work(*waiting.popleft())
        del self._waiting[lane]


CONSUMPTIONS: Mapping[str, type[Consumption]] = {ANY_ORDER: AnyOrder, BY_HAND: OrderByHand}


def peer(gate: StartingGate, *, system: str, way: str, address: str, **setting: Any) -> Mapping[str, Any]:
    return asyncio.run(_peer(gate, system, way, address, SlowSetting(**setting)))


async def _peer(gate: StartingGate, system: str, way: str, address: str, setting: SlowSetting) -> Mapping[str, Any]:
    async with INBOXES[system](address) as inbox:
        for _ in range(setting.each):
            await inbox.publish(setting.keys)
        handling = Handling(setting)
        most = setting.streams if way == ANY_ORDER else IN_HAND
        return await consume(gate, CONSUMPTIONS[way](inbox, handling.handle, most), handling)


async def consume(gate: StartingGate, consumption: Consumption, handling: Handling) -> Mapping[str, Any]:
    """Run the consumption while its handler is measured."""
    tasks = [asyncio.create_task(consumption.receive()), asyncio.create_task(consumption.acknowledge())]
    result = await handling.measure(gate)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=CLOSE_S)
    return result


# ---- the section -----------------------------------------------------------------------------------------------------


def run_alone(function: str, setting: SlowSetting) -> Result:
    return result_of([Job("consumer", f"{HERE}:{function}", args_of(setting))])


def run_over_grpc(setting: SlowSetting) -> Result:
    with SiloServer() as silo:
        return result_of([Job("consumer", f"{HERE}:over_grpc", {"address": silo.address, **args_of(setting)})], silo)


def run_peer(system: str, way: str, setting: SlowSetting) -> Result:
    with SERVERS[system]() as server:
        args = {"system": system, "way": way, "address": server.address, **args_of(setting)}
        return result_of([Job("consumer", f"{HERE}:peer", args)], server)


def ideal(setting: SlowSetting) -> Result:
    """Nothing runs: what the handlers' own time allows."""
    return Result(
        events=round((setting.streams - setting.stuck) / HANDLER_S * setting.seconds), seconds=setting.seconds
    )


def args_of(setting: SlowSetting) -> Mapping[str, float]:
    return {
        "streams": setting.streams,
        "stuck": setting.stuck,
        "seconds": setting.seconds,
        "warm_up_s": setting.warm_up_s,
    }


def result_of(jobs: Sequence[Job], server: Server | None = None) -> Result:
    outcome = together(jobs, server=server)
    return outcome.to_result(events=outcome.reports["consumer"].result["events"])


def section(peers: Sequence[str], setting: SlowSetting) -> Section:
    names = {"redis": "Redis Streams group", "nats": "NATS JetStream consumer"}
    cases: dict[str, Run] = {
        IDEAL: partial(ideal, setting),
        ASYNCIO: partial(run_alone, "alone", setting),
        SILO: partial(run_alone, "in_silo", setting),
        GRPC: partial(run_over_grpc, setting),
    }
    for system in [system for system in names if system in peers]:
        for way in CONSUMPTIONS:
            cases[f"{names[system]}, {way}"] = partial(run_peer, system, way, setting)
    return Section(
        name="slow-handlers",
        title=f"Handlers of 100 ms over {setting.streams:,} streams, {setting.stuck} of them stuck for ever",
        cases=cases,
        ratio_to=IDEAL,
        targets=tuple(
            Target(what=f"{case}: ≥ 0.99 × {to}", case=case, to=to, bound=0.99)
            for case in (SILO, GRPC)
            for to in (IDEAL, ASYNCIO)
        ),
    )
