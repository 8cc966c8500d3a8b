"""The pulling manager: the agents of one provider in this process, and the background work around them.

It only puts the parts together. `host_state.py` has the state that they share. Each part has one subject:

- `subscription_runner.py`: subscriptions begin, move and end;
- `queue_host.py`: leases of queues begin and end, agents stop and start;
- `checkpointer.py`: progress is stored;
- `failure_recorder.py`: dead letters and gaps are stored;
- `redriver.py`: dead letters are delivered once more;
- `retention.py`: finished events are deleted;
- `control_requests.py`: requests of other silos are applied.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from ..adapters.seam import QueueAdapter
from ..streams.errors import NotFound
from .agent import AgentStatistics
from .cache import CacheLimits
from .checkpointer import Checkpointer
from .control_requests import ControlRequestApplier
from .failure_recorder import FailureRecorder
from .host_state import HostState
from .progress_store import ProgressStore
from .queue_host import QueueHost
from .redriver import Redriver
from .retention import QueueAcknowledger, Retention
from .subscription_runner import SubscriptionRunner


class PullingManager:
    """Agents for the queues 0 to N-1 of a provider. All on one loop; `start` before use, `aclose` after."""

    def __init__(
        self,
        provider: str,
        queues: int,
        adapter: QueueAdapter,
        store: ProgressStore,
        limits: CacheLimits,
        *,
        detach_after_s: float,
        leased: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        """`leased`: the silo is one of several, and reads a queue while it has a lease: from `gain` to `lose` or
        `cut`. `rng` spreads the starts of the agents; None: a new one for each."""
        self.provider = provider
        leases: dict[int, int] | None = {} if leased else None
        self.recorder = FailureRecorder(provider, store, leases)
        state = self.state = HostState(
            provider, queues, adapter, self.recorder, limits, leases=leases, detach_after_s=detach_after_s, rng=rng
        )
        self.leases = leases
        """Epochs of the leases by queue. None: this process has all queues."""
        self.served = state.served
        self.stopped = state.stopped
        """Queues whose agents were stopped, until they are started again."""
        self.agents = state.agents
        self.checkpointer = Checkpointer(state, store)
        self.queue_host = QueueHost(state, store, self.checkpointer)
        self.subscriptions = SubscriptionRunner(state, store, self.checkpointer)
        self.queue_host.on_position_unknown = self.subscriptions.end_for_positions
        self.checkpointer.on_queue_refused = self.queue_host.cut
        self.checkpointer.on_subscription_refused = self.subscriptions.stop_fenced
        self.redriver = Redriver(state, store)
        self.retention = Retention(provider, queues, adapter, store)
        self.control_requests = ControlRequestApplier(state, store, self.queue_host, self.subscriptions)
        self.acknowledger = QueueAcknowledger(state, store, durable=adapter.capabilities.durable)
        self._rewindable = adapter.capabilities.rewindable

    def start(self) -> None:
        """Start the background work."""
        self._start(self.checkpointer.run(), "checkpoints")
        self._start(self.redriver.run(), "redrives")
        self._start(self.retention.run(), "retention")
        if self.leases is not None:
            self._start(self.control_requests.run(), "control requests")
        if not self._rewindable:
            self._start(self.acknowledger.run(), "acknowledgements")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.state.background.start(work, f"headrace {name} {self.provider}")

    async def aclose(self, drain_s: float) -> None:
        """Stop reading, let running handlers end within `drain_s` seconds, and store exactly the progress made."""
        await self.state.background.aclose()
        # A subscription whose progress cannot be stored must not keep the others from stopping in order.
        ends = [self.subscriptions.withdraw(name, drain_s) for name in list(self.served)]
        ended = await asyncio.gather(*ends, return_exceptions=True)
        # NotFound: another process took the subscription over meanwhile.
        failures = [end for end in ended if isinstance(end, BaseException) and not isinstance(end, NotFound)]
        await self.queue_host.aclose()
        await self.recorder.save_gaps()
        if failures:
            raise failures[0]

    def statistics(self) -> list[AgentStatistics]:
        """Statistics of each queue's agent."""
        return [agent.statistics() for agent in self.agents]
