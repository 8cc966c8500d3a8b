"""The queues of one provider in this process: their leases begin and end, and their agents stop and start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ..balancer.held_leases import LeaseTerm
from ..streams.background import BackgroundTasks
from ..streams.subscriptions import Checkpoint
from .checkpointer import Checkpointer
from .counts import LeaseCounts
from .host_state import HostState
from .progress_store import ProgressStore


class QueueHost:
    """Starts and stops the agents of queues. In a cluster it is the `QueueOwner` of `headrace.balancer`."""

    def __init__(self, state: HostState, store: ProgressStore, checkpointer: Checkpointer) -> None:
        self.on_position_unknown: Callable[[str], Awaitable[None]] = _ignore
        """Called with the name of a subscription whose position in a new queue only its consumer knows."""
        self.queues = state.queues
        self.lease_counts = LeaseCounts()
        self._state = state
        self._store = store
        self._checkpointer = checkpointer
        self._cutting = BackgroundTasks()
        self._giving_back = BackgroundTasks()
        self._losing: dict[int, tuple[float, asyncio.Future[None]]] = {}
        """Queues to give back: how long each may drain, and the future that its callers await."""

    async def aclose(self) -> None:
        """Stop all agents at once, and wait for those that stop already."""
        closing = [agent.aclose() for agent in self._state.agents]
        await asyncio.gather(*closing, self._cutting.join(), self._giving_back.join())

    # ---- agents stop and start on request ----------------------------------------------------------------------------

    async def stop_agents(self, queues: Sequence[int], drain_s: float) -> None:
        """Stop reading these queues. Events in flight have `drain_s` seconds to end, then exactly the progress made is
        stored. Queues that are stopped already stay so."""
        async with self._state.changing:
            self._state.stop(queues)
            await self._changes_end(drain_s)
            stopping = [self._stop_agent(queue, drain_s) for queue in queues]
            done = dict(zip(queues, await asyncio.gather(*stopping), strict=True))
            await self._checkpointer.save_stopped(done)
            for queue in queues:
                self._state.ended(queue)

    async def start_agents(self, queues: Sequence[int]) -> None:
        """Read these queues again, from their stored checkpoints on."""
        async with self._state.changing:
            await self._checkpointer.save_unsaved(queues)
            self._state.start(queues)

    async def _changes_end(self, limit_s: float) -> None:
        """Wait until subscriptions that are closed or moved now have stored their progress, or `limit_s` seconds."""
        if self._state.changes:
            await asyncio.wait(set(self._state.changes), timeout=limit_s)

    async def _stop_agent(self, queue: int, drain_s: float) -> dict[str, Checkpoint]:
        return await self._state.replace_agent(queue).aclose(drain_s)

    # ---- leases begin and end ----------------------------------------------------------------------------------------

    async def gain(self, queue: int, epoch: int, term: LeaseTerm) -> None:
        """The lease of a queue began: serve it from its stored checkpoints on, as long as the term lasts."""
        state = self._state
        assert state.leases is not None
        async with state.changing:
            await self._cutting.join()
            if state.leases.get(queue) == epoch:  # the same lease: the queue was not given back after all
                await self._checkpointer.save_unsaved([queue])
            self._checkpointer.drop_unsaved(queue)
            for served in [each for each in state.served.values() if not each.service.stored and queue in each.saved]:
                await self.on_position_unknown(served.definition.name)
            here = [each for each in (*state.served.values(), *state.paused.values()) if each.service.stored]
            stored: Mapping[str, Checkpoint] = {}
            if here:
                stored = await self._store.checkpoints_of_queue(state.provider, queue)
            for served in here:
                served.note_stored({queue: stored.get(served.definition.name)})
            state.gain(queue, epoch, term)
            self.lease_counts.gained += 1

    async def lose(self, queue: int, drain_s: float) -> None:
        """Give a queue back: events in flight have `drain_s` seconds to end, then exactly the progress made is stored.

        Queues that are given back at the same time drain together. If storing fails, this raises, and may be called
        again."""
        if not self._losing:
            self._giving_back.start(self._lose_all(), f"headrace gives back queues of {self._state.provider}")
        _, lost = self._losing.setdefault(queue, (drain_s, asyncio.get_running_loop().create_future()))
        await asyncio.shield(lost)

    async def _lose_all(self) -> None:
        async with self._state.changing:
            losing, self._losing = self._losing, {}
            try:
                await self._lose_some({queue: drain_s for queue, (drain_s, _) in losing.items()})
            except Exception as error:  # noqa: BLE001 (the callers of `lose` get it)
                for _, lost in losing.values():
                    lost.set_exception(error)
                    lost.exception()  # mark it as retrieved: the callers may be cancelled by now
            else:
                for _, lost in losing.values():
                    lost.set_result(None)

    async def _lose_some(self, losing: Mapping[int, float]) -> None:
        self._state.leave(losing)
        await self._changes_end(max(losing.values()))
        stopping = [self._stop_agent(queue, drain_s) for queue, drain_s in losing.items()]
        done = dict(zip(losing, await asyncio.gather(*stopping), strict=True))
        await self._checkpointer.save_stopped(done)
        for queue in losing:
            self._state.lose(queue)
        self.lease_counts.given_back += len(losing)

    def cut(self, queue: int) -> None:
        """The lease is over: stop at once, and store nothing."""
        self._checkpointer.drop_unsaved(queue)
        self._state.lose(queue)
        self.lease_counts.cut += 1
        self._cutting.start(self._stop_agent(queue, 0.0), f"headrace cut {self._state.provider}/{queue}")


async def _ignore(_: str) -> None: ...
