"""How another system is measured: the same cases for each, over a small client of its own.

`publish`: from the first send until everything is acknowledged. `end_to_end`: producer and consumer, two processes,
from the first send until the consumer has acknowledged everything. `fan_out`: consumers in one process that each read a
backlog, until each has acknowledged everything. `latency`: events at a steady rate, stamped just before they are sent,
until the consumer has them. One queue or stream, payloads of opaque bytes, a fresh server for each run.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from ..processes import Job, together
from ..results import Latency, Result
from ..servers import NotAvailable, Server


class Producer(Protocol):
    async def send(self, payloads: Sequence[bytes]) -> None:
        """Hand over a batch. Waits only where as much is unacknowledged as this client allows itself."""
        ...

    async def flush(self) -> None:
        """Return when everything sent is acknowledged. Raises where something was refused."""
        ...


class PeerConsumer(Protocol):
    async def receive(self) -> Sequence[bytes]:
        """Return the messages that arrived, and acknowledge them, or the earlier ones; none after a silent second."""
        ...

    async def finish(self) -> None:
        """Return when everything received is acknowledged."""
        ...


class PeerClient(Protocol):
    """The producing and the consuming side of one system; both are ready to go when entered.

    `batch` is how many events go together. `paced` is for latency: nothing waits for company. Consumers with different
    numbers each get everything.
    """

    def producer(self, address: str, *, batch: int, paced: bool = False) -> AbstractAsyncContextManager[Producer]: ...

    def consumer(
        self, address: str, *, batch: int, paced: bool = False, number: int = 0
    ) -> AbstractAsyncContextManager[PeerConsumer]: ...


class Peer(ABC):
    """Another system. Each measurement raises NotAvailable where its server cannot be had."""

    name: str
    client: str
    """`module:attribute` of its PeerClient."""
    requires: Sequence[str]
    """Modules that the client imports, of packages in the extra `bench`."""

    @abstractmethod
    def server(self) -> Server: ...

    def publish(self, *, events: int, size: int, batch: int) -> Result:
        args = {"events": events, "size": size, "batch": batch}
        with self._server() as server:
            outcome = together([self._job("producer", "publish", server, args)], server=server)
        return outcome.to_result(events=events, size=size)

    def end_to_end(self, *, events: int, size: int, batch: int) -> Result:
        args = {"events": events, "size": size, "batch": batch}
        with self._server() as server:
            jobs = [self._job("consumer", "consume", server, args), self._job("producer", "publish", server, args)]
            outcome = together(jobs, server=server)
        return outcome.to_result(events=events, size=size)

    def fan_out(self, *, events: int, size: int, batch: int, consumers: int) -> Result:
        args = {"events": events, "size": size, "batch": batch}
        with self._server() as server:
            together([self._job("producer", "publish", server, args)], server=server)
            consume = self._job("consumers", "consume_each", server, {**args, "consumers": consumers})
            outcome = together([consume], server=server)
        return outcome.to_result(events=events, size=size)

    def latency(self, *, rate: int = 2000, seconds: float = 5.0, size: int = 1024) -> Result:
        events = int(rate * seconds)
        with self._server() as server:
            consume = self._job("consumer", "consume_stamped", server, {"events": events})
            publish = self._job("producer", "publish_paced", server, {"events": events, "size": size, "rate": rate})
            outcome = together([consume, publish], server=server)
        latency = Latency(**outcome.reports["consumer"].result)
        return outcome.to_result(events=events, size=size, latency=latency)

    def _server(self) -> Server:
        missing = [module for module in self.requires if importlib.util.find_spec(module) is None]
        if missing:
            raise NotAvailable(f"{', '.join(missing)} cannot be imported: pip install 'headrace[bench]'")
        return self.server()

    def _job(self, role: str, case: str, server: Server, args: Mapping[str, Any]) -> Job:
        function = f"{__package__}.cases:{case}"
        return Job(role, function, {"client": self.client, "address": server.address, **args})
