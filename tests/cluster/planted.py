"""Bugs that a cluster must not have, planted on purpose: the simulation has to find each of them."""
# pyright: reportPrivateUsage=false

import asyncio
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from headrace.agents import Delivery, PullingManager
from headrace.agents.cursor import State, StreamCursor
from headrace.balancer.membership import Held, Membership
from headrace.streams import Checkpoint, SequenceToken
from headrace.streams.cluster import ClusterView


def no_fencing(stack: ExitStack) -> None:
    """Whoever had a lease goes on as if nothing had happened, and the store takes what it writes."""
    begin = PullingManager.__init__

    def begin_unfenced(manager: PullingManager, *args: Any, **options: Any) -> None:
        begin(manager, *args, **options)
        manager._store = _Unfenced(manager._store)  # type: ignore[assignment]

    stack.enter_context(patch.object(PullingManager, "__init__", begin_unfenced))
    stack.enter_context(patch.object(Delivery, "over", property(lambda delivery: delivery._stopping)))
    stack.enter_context(patch.object(Membership, "_look_at_time", _ignore))


def _ignore(_: object) -> None: ...


class _Unfenced:
    def __init__(self, store: Any) -> None:
        self._store = store

    def save_checkpoints(self, provider: str, progress: Any, leases: object = None) -> Any:
        return self._store.save_checkpoints(provider, progress)

    def add_dead_letters(self, letters: Any, epoch: int | None, leases: object = None) -> Any:
        return self._store.add_dead_letters(letters, epoch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def release_before_drain(stack: ExitStack) -> None:
    """The next owner may begin while the former one still delivers."""

    async def moved_out(membership: Membership, held: Held) -> None:
        lease = held.lease
        held.started = False
        await membership._store.release(membership.me, [lease])
        await membership._owners[lease.provider].lose(lease.queue, membership._options.drain_s)
        membership.held.pop((lease.provider, lease.queue), None)

    stack.enter_context(patch.object(Membership, "_moved_out", moved_out))


def checkpoint_of_the_maximum(stack: ExitStack) -> None:
    """What is stored is how far anybody got, whoever is behind."""

    def checkpoint(delivery: Delivery, *, limit: int | None = None) -> Checkpoint:
        return Checkpoint(delivery.position)

    stack.enter_context(patch.object(Delivery, "checkpoint", checkpoint))


def lease_from_the_answer(stack: ExitStack) -> None:
    """A lease is counted from when its renewal is answered, not from before it was asked for."""
    renewed = Membership._renewed

    def renewed_late(membership: Membership, view: ClusterView, began: float) -> None:
        renewed(membership, view, membership._loop.time())

    stack.enter_context(patch.object(Membership, "_renewed", renewed_late))


def lease_by_the_wall_clock(stack: ExitStack) -> None:
    """A lease is counted by a clock that can be set."""
    begin = Membership.__init__

    def begin_with_wall_clock(membership: Membership, *args: Any, **options: Any) -> None:
        begin(membership, *args, **options)
        membership._loop = _WallClock(membership._loop)  # type: ignore[assignment]

    stack.enter_context(patch.object(Membership, "__init__", begin_with_wall_clock))


class _WallClock:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def time(self) -> float:
        return time.time_ns() / 1e9 + self._loop.time()

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(max(0.0, when - self.time()), callback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def start_from_what_was_known(stack: ExitStack) -> None:
    """A queue that comes is served from where its checkpoints were when this process last saw them."""

    async def gain(manager: PullingManager, queue: int, epoch: int, term: Any) -> None:
        assert manager.leases is not None
        manager.leases[queue], manager._terms[queue] = epoch, term
        manager._attach_all(queue)

    stack.enter_context(patch.object(PullingManager, "gain", gain))


def done_when_handed_out(stack: ExitStack) -> None:
    """What is in somebody's hands counts as done."""
    needed = Delivery._needed

    def needed_behind_it(delivery: Delivery, cursor: StreamCursor) -> SequenceToken:
        token = needed(delivery, cursor)
        return SequenceToken(token.offset + 1) if cursor.state is State.RUNNING else token

    stack.enter_context(patch.object(Delivery, "_needed", needed_behind_it))


BUGS: Mapping[str, Callable[[ExitStack], None]] = {
    "no fencing": no_fencing,
    "release before drain": release_before_drain,
    "checkpoint of the maximum": checkpoint_of_the_maximum,
    "lease from the answer": lease_from_the_answer,
    "lease by the wall clock": lease_by_the_wall_clock,
    "start from what was known": start_from_what_was_known,
    "done when handed out": done_when_handed_out,
}


@contextmanager
def planted(bug: str) -> Generator[None]:
    with ExitStack() as stack:
        BUGS[bug](stack)
        yield
