"""Bugs that a cluster must not have, planted on purpose: the simulation has to find each of them."""
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from headrace.agents import Delivery, PullingManager
from headrace.balancer.membership import Held, Membership
from headrace.streams import Checkpoint


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


BUGS: Mapping[str, Callable[[ExitStack], None]] = {
    "no fencing": no_fencing,
    "release before drain": release_before_drain,
    "checkpoint of the maximum": checkpoint_of_the_maximum,
}


@contextmanager
def planted(bug: str) -> Generator[None]:
    with ExitStack() as stack:
        BUGS[bug](stack)
        yield
