"""Loaded by the silos of a cluster (`modules`): a handler, which writes down what it gets and under which lease, and
each checkpoint that the store takes."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.agents import PullingManager
from headrace.balancer import StreamQueueMapper
from headrace.balancer.membership import Term
from headrace.streams import Checkpoint, EventBatch, SequenceToken, Start
from headrace.streams.handlers import subscription
from headrace.streams.store import ControlStore, Refused
from tests.faults.cluster_notes import GOT, SAVED, Note, Notebook, now_ns

HANDLED = "handled"
SILO = Path.cwd().name
_notebook = Notebook(Path("notes"))
_managers: list[PullingManager] = []
_mappers: dict[int, StreamQueueMapper] = {}
_gain, _save = PullingManager.gain, ControlStore.save_checkpoints


async def gain(self: PullingManager, queue: int, epoch: int, term: Term) -> None:
    if self not in _managers:
        _managers.append(self)
        _mappers[self.queues] = StreamQueueMapper(self.queues)
    await _gain(self, queue, epoch, term)


async def save_checkpoints(
    self: ControlStore,
    provider: str,
    progress: Sequence[tuple[str, int, Mapping[int, Checkpoint]]],
    leases: Mapping[int, int] | None = None,
) -> Refused:
    notes, began = [note for name, _, done in progress for note in _noted(name, done, leases or {})], now_ns()
    refused = await _save(self, provider, progress, leases)
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
    (manager,) = _managers
    events = list(batch)
    queue = _mappers[manager.queues].queue_of(batch.stream)
    epoch = (manager.leases or {}).get(queue, 0)
    numbers, places = [int(event.payload) for event in events], [place(_token(event)) for event in events]
    now = now_ns()
    _notebook.write(Note(now, now, GOT, SILO, HANDLED, queue, epoch, str(batch.stream), numbers, places))
    await asyncio.sleep(random.choice((0, 0.002, 0.02)))


def _token(event: Any) -> SequenceToken:
    return event.token


PullingManager.gain = gain
ControlStore.save_checkpoints = save_checkpoints
