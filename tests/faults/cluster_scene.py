"""A cluster of silos as processes that are killed, stopped and cut off, with publishers and consumers.

Three subscriptions get everything: `handled` in the silos, `shared` by clients, `raw` by consumers that use
nothing but the protocol. Each notes its events, with times of the machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sqlite3
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import NamedTuple

from headrace import Client, Consumer, StreamId
from headrace.balancer import StreamQueueMapper
from headrace.store.control_store import ControlStore
from headrace.store.datadir import DataDirectory
from headrace.streams.cluster import ClusterView
from tests.faults import raw_consumer
from tests.faults.cluster_notes import (
    GOT,
    Note,
    Notes,
    Tail,
    check_complete,
    check_owners,
    check_saved_stays_done,
    now_ns,
)
from tests.faults.cluster_stores import lasting_port
from tests.faults.raw_consumer import REFUSED, SAVED, read_diary
from tests.faults.scene import check_history
from tests.faults.silo_process import SiloProcess

ROOT = Path(__file__).parents[2]
PATHS = (str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))
HANDLED, SHARED, RAW = "handled", "shared", "raw"
QUEUES = 6
PATIENCE_S = 60
WORKERS = 4
SESSION_S = 2.0
Silos = Sequence[SiloProcess]


def _streams() -> Sequence[str]:
    """Two for each queue."""
    mapper, of_queue = StreamQueueMapper(QUEUES), defaultdict[int, list[str]](list)
    for number in range(1000):
        of_queue[mapper.queue_of(StreamId("n", str(number)))].append(f"n/{number}")
    return [stream for queue in range(QUEUES) for stream in of_queue[queue][:2]]


STREAMS = _streams()


class Times(NamedTuple):
    """Of the cluster, in seconds."""

    period_s: float = 0.2
    lease_s: float = 2.0
    dead_after_s: float = 1.0
    maturity_s: float = 1.0


FAST = Times()


class Cluster:
    """Made by `playing`. Silos are known by name, and keep their ports."""

    def __init__(
        self,
        directory: Path,
        store: str | None,
        times: Times,
        addresses: Mapping[str, str],
        silos: dict[str, SiloProcess],
        provider: str = "",
    ) -> None:
        self.silos = silos
        self._provider = provider
        self._directory = directory
        self._store = store
        self._times = times
        self._addresses = addresses
        """Addresses by silo at which others reach it, if they differ from the one it listens at."""
        self._control: ControlStore | None = None
        self._notes = Notes()

    async def add(self, *names: str) -> None:
        """New silos, or known ones that ended, all at once. Returns once they serve."""
        for name in names:
            if name not in self.silos:
                self.silos[name] = self._new(name)
        await asyncio.gather(*(self.silos[name].start() for name in names))

    def _new(self, name: str) -> SiloProcess:
        folder = self._directory / name
        folder.mkdir()
        (self._directory / "data").mkdir(exist_ok=True)
        (folder / "data").symlink_to("../data")  # that is where a `SiloProcess` has its data
        silo = SiloProcess(folder, wrapper=("env", f"PYTHONPATH={os.pathsep.join(PATHS)}"), config=self._config(name))
        silo.address = f"127.0.0.1:{lasting_port()}"
        return silo

    def _config(self, name: str) -> str:
        lines = [
            'modules = ["tests.faults.cluster_handlers"]\ndrain_s = 5.0',
            f"[grpc]\nsession_timeout_s = {SESSION_S}",
            f'[cluster]\nname = "{name}"',
            *(f"{field} = {value}" for field, value in self._times._asdict().items()),
            *([f'store = "{self._store}"'] if self._store else []),
            *([f'address = "{self._addresses[name]}"'] if name in self._addresses else []),
            f"[providers.default]\nqueues = {QUEUES}\n{self._provider}",
        ]
        return "\n".join(lines) + "\n"

    def clean_up(self) -> None:
        for silo in self.silos.values():
            if silo.running:
                silo.signal(signal.SIGCONT)
            silo.clean_up()

    def address(self, *first: str) -> str:
        """All addresses, for a client; those of some silos first."""
        names = [*first, *(name for name in self.silos if name not in first)]
        return ",".join(self.silos[name].address for name in names)

    # ---- contents of the control store -----------------------------------------------------------------------------

    async def control(self) -> ControlStore:
        if self._control is None:
            where = self._store or DataDirectory(self._directory / "data").control_db
            self._control = await ControlStore.open(where, timeout_s=5.0)
        return self._control

    async def view(self) -> ClusterView:
        return await (await self.control()).cluster().view()

    async def aclose(self) -> None:
        if self._control is not None:
            await self._control.aclose()

    async def owners(self) -> Mapping[int, str]:
        """Of queues that have one, or had one that died."""
        view = await self.view()
        return {lease.queue: lease.owner for lease in view.valid}

    async def epochs(self) -> Mapping[int, int]:
        return {lease.queue: lease.epoch for lease in (await self.view()).leases}

    async def until_shared(self, *counts: int) -> None:
        """All queues have owners, of which each has so many."""

        async def shared() -> bool:
            owners = Counter((await self.owners()).values())
            return sorted(owners.values()) == sorted(counts)

        await until(shared, self._standing)

    async def _standing(self) -> object:
        return await self.view()

    async def is_writable(self) -> bool:
        """Whether no process has a transaction open. Only matters if the control store has one writer at a time."""
        return self._store is not None or await asyncio.to_thread(_is_writable, self._directory / "data")

    async def until_said(self, what: str, times: int) -> None:
        """So often in the logs of the silos together."""

        async def said() -> bool:
            return sum(silo.log.count(what) for silo in self.silos.values()) >= times

        await until(said, self._standing)

    def notes(self) -> Sequence[Note]:
        """Of all silos."""
        return self._notes.read(silo.directory / "notes" for silo in self.silos.values())

    def handled(self) -> Sequence[Note]:
        return [note for note in self.notes() if note.what == GOT]


def _is_writable(data: Path) -> bool:
    with closing(sqlite3.connect(DataDirectory(data).control_db, timeout=0.5)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        return True


async def until(condition: Callable[[], Awaitable[bool]], explain: Callable[[], Awaitable[object]]) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if await condition():
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"it does not come about: {await explain()}") from None


# ---- publishers and consumers ----------------------------------------------------------------------------------------


class Got(NamedTuple):
    at_ns: int
    stream: str
    number: int
    acknowledged: bool
    """Its acknowledgement was the client's before it came."""


class ClientConsumer:
    """A consumer of `shared`, by the client: several workers that take their time."""

    def __init__(self, name: str, address: str, rng: random.Random) -> None:
        self.name = name
        self.got: list[Got] = []
        self._address = address
        self._rng = rng
        self._acknowledged: set[tuple[str, int]] = set()
        self._in_hand = 0
        """Batches that a worker has not acknowledged yet."""
        self._ends = asyncio.Event()
        self.attached = asyncio.Event()

    async def run(self) -> None:
        async with (
            Client(self._address, connect_timeout_s=PATIENCE_S, timeout_s=PATIENCE_S) as client,
            client.subscribe(
                SHARED, "n/*", start="earliest", consumer=self.name, session_timeout_s=SESSION_S, max_events=400
            ) as consumer,
        ):
            self.attached.set()
            workers = [asyncio.create_task(self._work(consumer)) for _ in range(WORKERS)]
            try:
                await self._ends.wait()
                while self._in_hand:  # noqa: ASYNC110 (else they would come again, to the other client)
                    await asyncio.sleep(0.01)
                await consumer.saved()
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    def end(self) -> None:
        self._ends.set()

    async def _work(self, consumer: Consumer) -> None:
        async for batch in consumer:
            self._in_hand += 1
            stream, now = str(batch.stream), now_ns()
            events = [(stream, int(payload)) for payload in batch.payloads()]
            self.got += [Got(now, *event, event in self._acknowledged) for event in events]
            await asyncio.sleep(self._rng.choice((0, 0.002, 0.02)))
            self._acknowledged.update(events)
            await batch.ack()
            self._in_hand -= 1


class Load:
    """Publishers and consumers."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.cluster = cluster
        self.rng = rng
        self.published: Counter[str] = Counter()
        """How many of each stream are stored."""
        self.clients: list[ClientConsumer] = []
        self._raw: list[Path] = []
        self._raw_tails: list[Tail] = []
        self._raw_got: list[tuple[int, str, int]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._enough = asyncio.Event()
        self._others = asyncio.all_tasks()
        self._publishing: list[asyncio.Task[None]] = []

    async def start(self, attached: Iterable[str]) -> None:
        """With a publisher, and consumers at these silos."""
        for number, name in enumerate(attached):
            client = ClientConsumer(f"client-{number}", self.cluster.address(name), self.rng)
            self.clients.append(client)
            self._tasks.append(asyncio.create_task(client.run(), name=f"client at {name}"))
        for client in self.clients:
            await client.attached.wait()
        await self._begin_raw()
        self._publishing = [asyncio.create_task(self.publish(), name="publisher")]

    async def _begin_raw(self) -> None:
        """Each at its own silo, whatever becomes of that."""
        async with Client(self.cluster.address()) as client:
            async with client.subscribe(RAW, "n/*", start="earliest"):
                pass  # so that it exists
        for number, (name, silo) in enumerate(list(self.cluster.silos.items())[-2:]):
            diary = silo.directory / "raw.diary"
            arguments = argparse.Namespace(
                address=silo.address, subscription=RAW, consumer=f"raw-{number}", timeout_ms=round(SESSION_S * 1000),
                seed=self.rng.getrandbits(30), diary=diary, hold=False,
            )  # fmt: skip
            consumer = raw_consumer.Consumer(arguments)
            self._raw.append(diary)
            self._raw_tails.append(Tail(diary))
            self._tasks.append(asyncio.create_task(consumer.run(), name=f"raw consumer at {name}"))

    async def publish(self) -> None:
        async with Client(self.cluster.address(), connect_timeout_s=PATIENCE_S, timeout_s=2 * PATIENCE_S) as client:
            while not self._enough.is_set():
                counts = {stream: self.rng.randint(1, 3) for stream in STREAMS}
                await client.publish_many(
                    (StreamId.parse(stream), b"%d" % (self.published[stream] + number))
                    for stream, count in counts.items()
                    for number in range(count)
                )
                self.published.update(counts)
                await asyncio.sleep(0.03)

    async def flowing(self) -> None:
        """Return once every consumer got an event published after this call."""
        stream = self.rng.choice(STREAMS)
        number = self.published[stream] + 3

        async def come() -> bool:
            return all((stream, number) in set(events) for events in self.events().values())

        await until(come, self.standing)

    async def until_handled_by(self, *names: str) -> None:
        """Each of these silos handles something that comes from now on."""
        now = now_ns()

        async def handled() -> bool:
            return {note.silo for note in self.cluster.handled() if note.began_ns > now} >= {*names}

        await until(handled, self.standing)

    async def until_published(self, more: int) -> None:
        wanted = sum(self.published.values()) + more

        async def published() -> bool:
            return sum(self.published.values()) >= wanted

        await until(published, self.standing)

    async def until_clients_get_more(self) -> None:
        """Each of them."""
        now = now_ns()

        async def got() -> bool:
            return all(client.got and client.got[-1].at_ns > now for client in self.clients)

        await until(got, self.standing)

    async def is_publishing(self) -> bool:
        """Whether an event published now is stored within a second."""
        try:
            async with asyncio.timeout(1):
                await self.until_published(1)
        except TimeoutError:
            return False
        return True

    async def until_handled_everywhere(self) -> None:
        """Something of every queue, from now on."""
        now = now_ns()

        async def handled() -> bool:
            return len({note.queue for note in self.cluster.handled() if note.began_ns > now}) == QUEUES

        await until(handled, self.standing)

    async def finish(self) -> None:
        """No more is published; everything is consumed."""
        self._enough.set()
        await asyncio.gather(*self._publishing)

        async def everywhere() -> bool:
            missing = self.missing()
            return not any(missing.values())

        await until(everywhere, self.standing)
        for client in self.clients:
            client.end()

    def missing(self) -> Mapping[str, int]:
        return {name: sum(self.published.values()) - len(set(events)) for name, events in self.events().items()}

    async def standing(self) -> object:
        return {"missing": self.missing(), "view": await self.cluster.view()}

    async def aclose(self) -> None:
        tasks, others = [*self._publishing, *self._tasks], self._others
        for client in self.clients:
            client.end()
        for task in tasks:
            if not task.get_name().startswith("client"):
                task.cancel()
        await asyncio.wait([*tasks], timeout=15)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        if left := asyncio.all_tasks() - others - {asyncio.current_task()}:  # gRPC's, of calls that were cut off
            await asyncio.wait(left, timeout=5)
        for ended in ends:
            if isinstance(ended, Exception):
                raise ended

    # ---- notes -----------------------------------------------------------------------------------------------------

    def events(self) -> Mapping[str, Sequence[tuple[str, int]]]:
        """What came to each subscription, in the order in which it did."""
        handled = [(note.stream, number) for note in self.cluster.handled() for number in note.numbers]
        shared = sorted(got for client in self.clients for got in client.got)
        return {
            HANDLED: handled,
            SHARED: [(got.stream, got.number) for got in shared],
            RAW: [(stream, number) for _, stream, number in self._raw_events()],
        }

    def _raw_events(self) -> Sequence[tuple[int, str, int]]:
        for tail in self._raw_tails:
            for line in tail.lines():
                at, what, stream, number, *_ = line.decode().split("\t")
                if what == GOT:
                    self._raw_got.append((int(at), stream, int(number)))
        self._raw_got.sort()
        return self._raw_got

    def summary(self) -> str:
        """How much there was, and how much of it more than once."""
        again = {name: len(events) - len(set(events)) for name, events in self.events().items()}
        return f"{sum(self.published.values()):,} events; came again: {again}"

    def check(self, *, once: bool = False, stood_still: bool = False) -> None:
        """Check that no event is lost or out of order, that each queue has one owner at a time, and that no
        acknowledged event comes again.

        With `stood_still`, silos were stopped: events on their way through one may come late, and are not acknowledged
        twice.
        """
        notes = self.cluster.notes()
        check_owners(notes)
        check_saved_stays_done(notes, HANDLED)
        for name, events in self.events().items():
            check_complete(name, events, self.published, once=once)
        for client in self.clients:
            for got in client.got:
                assert not got.acknowledged, f"{client.name} had acknowledged {got}"
        diaries = [[entry for entry in read_diary(path) if entry.what != REFUSED] for path in self._raw]
        if stood_still:
            twice = Counter((entry.stream, entry.number) for diary in diaries for entry in diary if entry.what == SAVED)
            assert not (again := [event for event, times in twice.items() if times > 1]), f"accepted twice: {again}"
        else:
            check_history(diaries)


@asynccontextmanager
async def playing(
    directory: Path,
    store: str | None,
    names: Iterable[str],
    *,
    times: Times = FAST,
    addresses: Mapping[str, str] = {},
    silos: dict[str, SiloProcess] | None = None,
    provider: str = "",
) -> AsyncGenerator[Cluster]:
    """A cluster of silos. All its processes end with the block; if that fails, their output is printed. `addresses` has
    the addresses at which others reach silos, if they differ from their own. `silos` is filled with the processes.
    `provider` has more lines of the provider's configuration."""
    cluster = Cluster(directory, store, times, addresses, {} if silos is None else silos, provider)
    try:
        await cluster.add(*names)
        yield cluster
    except BaseException:
        for name, silo in cluster.silos.items():
            print(f"---- {name}\n{silo.log[-int(os.environ.get('CHAOS_LOG', '4000')) :]}")
        raise
    finally:
        cluster.clean_up()
        await cluster.aclose()


@asynccontextmanager
async def loaded(cluster: Cluster, rng: random.Random, attached: Iterable[str]) -> AsyncGenerator[Load]:
    """Events flow meanwhile; at the end all of them have been consumed."""
    async with AsyncExitStack() as stack:
        load = Load(cluster, rng)
        stack.push_async_callback(load.aclose)
        await load.start(attached)
        yield load
        await load.finish()
