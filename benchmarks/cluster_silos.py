"""Silos that share the queues of a provider, each a process of its own, to be measured together."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.store.control_store import ControlStore
from headrace.streams.cluster import ClusterView

from .servers import NotAvailable, Server

QUEUES = 8
SHARE_S = 60.0
"""How long the silos may take to share the queues."""


class ClusterSilo(Server):
    """`headrace silo` as one of several; without `cluster`, by itself."""

    name = "silo"

    def __init__(self, data: Path, name: str, cluster: Mapping[str, object] | None, modules: Sequence[str]) -> None:
        super().__init__()
        self._data = data
        self._name = name
        self._cluster = cluster
        self._modules = modules

    def prepare(self) -> None:
        lines = [f"modules = [{', '.join(map(_quoted, self._modules))}]", "[providers.default]", f"queues = {QUEUES}"]
        if self._cluster is not None:
            options = {"name": self._name, **self._cluster}
            lines += ["[cluster]", *(f"{option} = {_quoted(value)}" for option, value in options.items())]
        (self.directory / "silo.toml").write_text("\n".join(lines) + "\n")

    def command(self) -> Sequence[str]:
        script = str(Path(sys.executable).parent / "headrace")
        return (script, "silo", "silo.toml", "--data", str(self._data), "--listen", self.address)

    def ping(self) -> bool:
        return "silo is ready" in (self.directory / "server.log").read_text(errors="replace")


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


class BenchmarkSilos(Server):
    """`count` silos over one data directory, for the length of a `with`; all queues are shared when it begins. Its CPU
    time and memory are those of all of them."""

    name = "silos"

    def __init__(
        self,
        count: int,
        *,
        cluster: Mapping[str, object] | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        """`cluster` are options of `[cluster]`; None is one silo without."""
        super().__init__()
        self.silos = [ClusterSilo(self.data, f"silo-{n}", cluster, modules) for n in range(count)]
        self._cluster = cluster

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def control(self) -> str:
        """Place of the control data."""
        store = self._cluster and self._cluster.get("store")
        return str(store or self.data / "control.db")

    @property
    def addresses(self) -> Sequence[str]:
        return [silo.address for silo in self.silos]

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def ping(self) -> bool:
        return True

    def start(self) -> None:
        for silo in self.silos:
            silo.start()
        if self._cluster is not None:
            asyncio.run(self._until_shared())

    def stop(self) -> None:
        for silo in self.silos:
            silo.close()

    def cpu_s(self) -> float:
        return sum(silo.cpu_s() for silo in self.silos)

    def peak_rss_bytes(self) -> int:
        return sum(silo.peak_rss_bytes() for silo in self.silos)

    async def _until_shared(self) -> None:
        store = await ControlStore.open(self.control)
        deadline = time.monotonic() + SHARE_S
        try:
            while not _is_shared(await store.cluster().view(), len(self.silos)):
                if time.monotonic() > deadline:
                    raise NotAvailable(f"{len(self.silos)} silos did not share {QUEUES} queues in {SHARE_S:g} s")
                await asyncio.sleep(0.1)
        finally:
            await store.aclose()


def owners(view: ClusterView) -> Mapping[int, str]:
    return {lease.queue: lease.owner for lease in view.valid}


def _is_shared(view: ClusterView, silos: int) -> bool:
    counts = Counter(owners(view).values())
    return sum(counts.values()) == QUEUES and len(counts) == silos and max(counts.values()) <= -(-QUEUES // silos)
