"""How long the queues of a cluster were without a silo that serves them, as this silo saw it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ..streams.cluster import ClusterView


class UnservedQueues:
    """Compares the leases of each view of the cluster with the queues of the providers."""

    def __init__(self, queues: Mapping[str, int]) -> None:
        """`queues`: the number of queues by provider."""
        self._queues = queues
        self._since: dict[str, dict[int, float]] = {name: {} for name in queues}
        """When each unserved queue was seen unserved for the first time, by provider."""
        self._ended_s = dict.fromkeys(queues, 0.0)
        """The time without a silo, summed over queues that have one again."""

    def update(self, view: ClusterView, now: float) -> None:
        """Take a view of the cluster, read at `now`, in seconds of a monotonic clock."""
        served = {(lease.provider, lease.queue) for lease in view.valid}
        for provider, since in self._since.items():
            for queue in range(self._queues[provider]):
                if (provider, queue) not in served:
                    since.setdefault(queue, now)
                elif queue in since:
                    self._ended_s[provider] += now - since.pop(queue)

    def count(self, provider: str) -> int:
        """The number of queues that no silo serves, in the last view."""
        return len(self._since[provider])

    def total_s(self, provider: str, now: float) -> float:
        """The time without a silo so far, summed over the queues, in seconds."""
        return self._ended_s[provider] + sum(now - since for since in self._since[provider].values())
