"""Loaded by the silos of a cluster (`modules`): a handler that notes its events and their lease. Each checkpoint
that the store accepts is noted, too."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace import EventBatch, SequenceToken, Start
from headrace.agents.host_state import HostState
from headrace.balancer import StreamQueueMapper
from headrace.balancer.held_leases import LeaseTerm
from headrace.store.control_store import ControlStore
from headrace.streams.handlers import subscription
from headrace.streams.progress import RefusedProgress
from headrace.streams.subscriptions import Checkpoint
from tests.faults.cluster_notes import GOT, SAVED, Note, Notebook, now_ns

HANDLED = "handled"
SILO = Path.cwd().name
_notebook = Notebook(Path("notes"))
_hosts: list[HostState] = []
_mappers: dict[int, StreamQueueMapper] = {}
_gain, _save = HostState.gain, ControlStore.save_checkpoints


def gain(self: HostState, queue: int, epoch: int, term: LeaseTerm) -> None:
    if self not in _hosts:
        _hosts.append(self)
        _mappers[self.queues] = StreamQueueMapper(self.queues)
    _gain(self, queue, epoch, term)


async def save_checkpoints(
    self: ControlStore,
    provider: str,
    progress: Sequence[tuple[str, int, Mapping[int, Checkpoint]]],
    leases: Mapping[int, int] | None = None,
    *,
    revision: int = 0,
) -> RefusedProgress:
    notes, began = [note for name, _, done in progress for note in _noted(name, done, leases or {})], now_ns()
    refused = await _save(self, provider, progress, leases, revision=revision)
    taken = [note for note in notes if note.subscription not in refused.subscriptions]
    ended = now_ns()
    _notebook.write(
        *(note._replace(began_ns=began, ended_ns=ended) for note in taken if note.queue not in refused.queues)
    )
    return refused


def _noted(subscription: str, positions: Mapping[int, Checkpoint], leases: Mapping[int, int]) -> Sequence[Note]:
    return [
        Note(
            0, 0, SAVED, SILO, subscription, queue, leases.get(queue, 0), next_offset=done.next_offset,
            behind={str(stream): place(behind.token) for stream, behind in done.behind.items()},
        )
        for queue, done in positions.items()
    ]  # fmt: skip


def place(token: SequenceToken) -> tuple[int, int]:
    return token[0], token[1]


@subscription(HANDLED, "n/*", batch=True, start=Start.earliest())
async def handle(batch: EventBatch) -> None:
    (host,) = _hosts
    events = list(batch)
    queue = _mappers[host.queues].queue_of(batch.stream)
    epoch = (host.leases or {}).get(queue, 0)
    numbers, places = [int(event.payload) for event in events], [place(_token(event)) for event in events]
    now = now_ns()
    _notebook.write(Note(now, now, GOT, SILO, HANDLED, queue, epoch, str(batch.stream), numbers, places))
    await asyncio.sleep(random.choice((0, 0.002, 0.02)))


def _token(event: Any) -> SequenceToken:
    return event.token


HostState.gain = gain
ControlStore.save_checkpoints = save_checkpoints
