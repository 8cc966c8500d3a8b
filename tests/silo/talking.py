"""Silos of a cluster, and their supervisors, as real processes whose output is read."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from headrace.proto.v1 import cluster_pb2 as pb
from tests.cli.commandline import ENVIRONMENT
from tests.cli.forking import forking

PATIENCE_S = 60
TIMES = "period_s = 0.1\nlease_s = 15\ndead_after_s = 10\nmaturity_s = 0.2\n"


class Talking:
    """A process, and everything that it has written to stderr."""

    def __init__(self, directory: Path, *arguments: object) -> None:
        self.process = forking().start(
            list(map(str, arguments)), cwd=directory, env=ENVIRONMENT,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.directory = directory
        self.said = ""
        self._news = threading.Condition()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                with self._news:
                    self.said += line.decode()
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def until_said(self, pattern: str, after: int = 0) -> re.Match[str]:
        """Wait until its output matches `pattern`. The first `after` characters are not searched."""
        with self._news:
            self._news.wait_for(
                lambda: re.search(pattern, self.said[after:]) or self.process.poll() is not None, PATIENCE_S
            )
            match = re.search(pattern, self.said[after:])
        assert match is not None, self.said
        return match

    def has_ended(self, within_s: float) -> bool:
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ended(self) -> int:
        """Wait for its end, and for the end of all processes that share its stderr. Return the exit code."""
        code = self.process.wait(PATIENCE_S)
        self._reading.join(PATIENCE_S)
        assert not self._reading.is_alive(), self.said
        return code

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.ended()


class SiloOfCluster(NamedTuple):
    name: str
    address: str
    talking: Talking

    def signal(self, number: signal.Signals) -> None:
        self.talking.process.send_signal(number)


@contextmanager
def silos(
    directory: Path,
    names: Iterable[str],
    *,
    store: str = "",
    grpc: str = "",
    times: str = TIMES,
) -> Generator[list[SiloOfCluster]]:
    """They serve for the length of a `with`; processes that are left at its end are killed."""
    with ExitStack() as stack:
        started: list[tuple[str, Talking]] = []
        for name in names:
            cluster = f'[cluster]\nname = "{name}"\n{times}' + (f'store = "{store}"\n' if store else "")
            (directory / f"{name}.toml").write_text(f'data = "data"\n[grpc]\nport = 0\n{grpc}\n{cluster}')
            started.append((name, Talking(directory, "silo", f"{name}.toml")))
            stack.callback(started[-1][1].clean_up)
        yield [SiloOfCluster(name, address_of(silo), silo) for name, silo in started]


def address_of(silo: Talking) -> str:
    return silo.until_said(r"silo is ready: .*gRPC on (\S+)\n")[1]


def wait_until(address: str, good: Callable[[pb.Cluster], bool]) -> None:
    """Look at the cluster, as this silo describes it, until it is `good`."""
    cluster = pb.Cluster()
    opened: Any = grpc.insecure_channel(address)
    with opened as channel:
        describe = channel.unary_unary("/headrace.v1.ClusterService/DescribeCluster")
        for _ in range(PATIENCE_S * 20):
            cluster = pb.DescribeClusterResponse.FromString(describe(b"", timeout=PATIENCE_S)).cluster
            if good(cluster):
                return
            time.sleep(0.05)
    raise AssertionError(cluster)


def shares(cluster: pb.Cluster) -> dict[str, int]:
    """Return the number of queues of each silo that answers."""
    return {
        silo.name: sum(len(provider.queues) for provider in silo.providers)
        for silo in cluster.silos
        if silo.state not in ("dead", "unreachable")
    }


def gone(pids: Iterable[int]) -> bool:
    """Wait until all these processes have ended, which need not be this one's."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([descriptor], [], [], PATIENCE_S)
        os.close(descriptor)
        if not ended:
            return False
    return True
