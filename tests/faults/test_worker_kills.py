"""`uvicorn --workers` with an embedded provider, whose workers are killed at random: nothing is lost, the order of each
stream holds, and no worker gets `Busy`. `CHAOS_WORKER_EVENTS` sets the number of events of the long test."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.frameworks.server import Uvicorn

APPLICATION = Path(__file__).parents[1] / "frameworks" / "counting_app.py"
STREAMS = 10
PATIENCE_S = 100


class Handled(NamedTuple):
    """A line that a handler wrote."""

    worker: int
    token: tuple[int, int]
    number: int


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Uvicorn]]:
    started: list[Uvicorn] = []

    def begin(workers: int) -> Uvicorn:
        shutil.copy(APPLICATION, tmp_path)
        started.append(Uvicorn(tmp_path, "counting_app:app", workers))
        started[-1].start()
        return started[-1]

    yield begin
    for one in started:
        one.clean_up()


def publish(url: str, key: int, events: int, batch: int, ended: threading.Event) -> int:
    """Publish numbers from 0 on to one stream, in order: at least `events`, and until all kills `ended`. A call that
    a killed worker did not answer is repeated. Return how many were published."""
    first = 0
    while first < events or not ended.is_set():
        deadline = time.monotonic() + PATIENCE_S
        while not post(url, f"/{key}?first={first}&count={batch}"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        first += batch
    return first


def post(url: str, path: str) -> bool:
    """Call the application over a connection of its own, which any worker may accept. Return False if it has no
    answer."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
    try:
        connection.request("POST", path)
        answer = connection.getresponse()
        assert answer.status == HTTPStatus.OK, answer.read()
    except (OSError, HTTPException):
        return False
    else:
        return True
    finally:
        connection.close()


def read(directory: Path) -> dict[str, list[Handled]]:
    """What the handlers wrote, by stream."""
    found: dict[str, list[Handled]] = defaultdict(list)
    for line in (directory / "handled").read_text().splitlines():
        worker, key, offset, index, number = line.split()
        found[key].append(Handled(int(worker), (int(offset), int(index)), int(number)))
    return found


def missing(directory: Path, published: dict[str, int]) -> int:
    found = read(directory)
    return sum(events - len({one.number for one in found[key]}) for key, events in published.items())


def living(directory: Path) -> list[int]:
    """The workers that run, and serve or are about to."""
    pids = [int(path.name.removeprefix("worker-")) for path in directory.glob("worker-*")]
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()]


def serving(directory: Path, after: int) -> tuple[int, int]:
    """Return the worker that handled the last event, and the length of the file. 0 if the file is not longer than
    `after`."""
    file = directory / "handled"
    size = file.stat().st_size if file.exists() else 0
    if size <= after:
        return 0, after
    with file.open("rb") as opened:
        opened.seek(max(size - 200, 0))
        return int(opened.read(size).split(b"\n")[-2].split()[0]), size


def check(lines: list[Handled], events: int) -> int:
    """Check the events of one stream: all came, in order. Return how many came again."""
    order = sorted({one.token for one in lines})
    rank = {token: at for at, token in enumerate(order)}
    reached = -1
    for before, one in zip([None, *lines], lines, strict=False):
        at = rank[one.token]
        assert at <= reached + 1, f"{one} came before {order[reached + 1]}"
        if before is not None and before.worker == one.worker:
            assert at == rank[before.token] + 1, f"{one} came after {before}"
        reached = max(reached, at)
    numbers = dict.fromkeys(one.number for one in sorted(lines, key=lambda one: one.token))
    assert list(numbers) == list(range(events))
    return len(lines) - len(order)


def run(server: Uvicorn, *, events: int, batch: int, kills: int, pause_s: float, seed: int) -> None:
    """Publish while workers are killed, and check what the handlers got. Each kill is after new events were handled.
    Every other kill is of the worker that serves."""
    rng, directory = random.Random(seed), server.directory
    size, killed, ended = 0, list[int](), threading.Event()
    with ThreadPoolExecutor(STREAMS) as threads:
        each = -(-events // STREAMS)
        publishing = {str(key): threads.submit(publish, server.url, key, each, batch, ended) for key in range(STREAMS)}
        deadline = time.monotonic() + PATIENCE_S * kills
        while len(killed) < kills and time.monotonic() < deadline:
            time.sleep(rng.uniform(0, 2 * pause_s))
            worker, size = serving(directory, size)
            others = [pid for pid in living(directory) if pid not in killed]
            if worker not in others:
                continue
            chosen = rng.choice(others) if len(killed) % 2 else worker
            os.kill(chosen, signal.SIGKILL)
            killed.append(chosen)
        ended.set()
        published = {key: one.result() for key, one in publishing.items()}
    deadline = time.monotonic() + PATIENCE_S
    while missing(directory, published):
        assert time.monotonic() < deadline, f"{missing(directory, published)} events did not come:\n{server.log}"
        time.sleep(0.1)
    assert server.stop() == 0
    found = read(directory)
    again = sum(check(found[key], events) for key, events in published.items())
    served = {one.worker for lines in found.values() for one in lines}
    came = f"{sum(published.values())} events, {again} came again"
    print(f"seed {seed}: {len(killed)} workers killed, {len(served)} served, {came}")
    assert found.keys() == published.keys()
    assert len(killed) == kills
    assert len(served) > 1
    for word in ("Busy", "is served by", "Traceback"):
        assert word not in server.log, server.log
    shutil.rmtree(directory / "data")


def test_workers_that_are_killed_lose_nothing(start: Callable[[int], Uvicorn]) -> None:
    run(start(2), events=3000, batch=10, kills=2, pause_s=0.2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_workers_that_are_killed_lose_nothing(start: Callable[[int], Uvicorn]) -> None:
    events = int(os.environ.get("CHAOS_WORKER_EVENTS", "100000"))
    seed = random.SystemRandom().randrange(1 << 32)
    run(start(4), events=events, batch=20, kills=events // 2000, pause_s=1.0, seed=seed)
