"""The silos that own queues, as a consumer sees them, and when it uses a gateway instead. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .transport import reconnect_backoff

UNREACHED_S = 3.0
"""After so many seconds without reaching an owner, the consumer goes on with a gateway."""
LOST_S = 15.0
"""The same for an owner that was reached before: if it was killed, its queues soon have another owner."""
GATEWAY_S, MAX_GATEWAY_S = 30.0, 3600.0
"""Seconds after which a consumer with a gateway tries direct sessions again. It doubles each time."""


class OwnerSilo:
    """A silo of the placement."""

    def __init__(self, silo: str, address: str, now: float) -> None:
        self.silo = silo
        self.address = address
        self.backoff = reconnect_backoff()
        self.not_before = now
        self.unreached_since: float | None = now
        self.was_reached = False

    def reached(self) -> None:
        self.backoff.reset()
        self.unreached_since = None
        self.was_reached = True

    def failed(self, now: float) -> None:
        self.not_before = now + self.backoff.next_s()
        if self.unreached_since is None:
            self.unreached_since = now

    def is_unreachable(self, now: float) -> bool:
        limit_s = LOST_S if self.was_reached else UNREACHED_S
        return self.unreached_since is not None and now - self.unreached_since > limit_s


class OwnerSilos(dict[str, OwnerSilo]):
    """The silos that own queues, by name."""

    is_known = False
    """Whether a silo has sent the placement."""

    def place(self, addresses: Mapping[str, str], called: Collection[str], now: float) -> None:
        """Silos have sent the owners, with their addresses. `called` are the silos with open sessions."""
        self.is_known = True
        for silo in self.keys() - addresses.keys():
            del self[silo]
        for silo, address in addresses.items():
            if silo not in self or self[silo].address != address:
                self[silo] = OwnerSilo(silo, address, now)
                if silo in called:
                    self[silo].reached()

    def forget(self) -> None:
        """Forget all, because other sessions are opened."""
        self.clear()
        self.is_known = False


class GatewayUse:
    """Whether a consumer uses a gateway, and when it tries direct sessions again."""

    def __init__(self) -> None:
        self.is_used = False
        self.ends_at = 0.0
        """Loop time at which it tries direct sessions again."""
        self.changes = 0
        """Changes to a gateway, or from one. Sessions that end late must not take over from newer ones."""
        self._pause_s = GATEWAY_S

    def change(self, now: float) -> None:
        """Use a gateway, or none any more."""
        self.is_used = not self.is_used
        self.changes += 1
        if self.is_used:
            self.ends_at = now + self._pause_s
            self._pause_s = min(self._pause_s * 2, MAX_GATEWAY_S)
