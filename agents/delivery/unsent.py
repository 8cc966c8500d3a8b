"""How many bytes may wait to be sent to consumers, and how many batches they may hold. Pure.

Bytes count from the time when they are handed to a consumer until their write returns. Without a common bound, many
consumers that grant credit and never read would fill the memory with a message each.

The limit is divided by dynamic thresholds (Choudhury and Hahne, 1998). If n clients hold bytes, each of them may hold
one part in n + 1 of the bytes that the process has left. The consumers of a client divide half the limit in the same
way. So n clients that never read leave at least one part in n + 1 of the limit.

A consumer that holds nothing gets one batch if the batch fits into the remaining bytes, and into its client's share:
one part in n + 1 of the limit. A client that holds nothing gets a batch that fits into the remaining bytes.

A consumer that has acknowledged nothing yet counts against half of the limit. So new consumers that never read leave
the other half to the others.

Batches count from the time when they are handed to a consumer until their parcel is acknowledged or taken back. A
consumer may hold up to `BATCH_SHARE` times the batches that are left of `MAX_BATCHES`, or of half of them if it has
acknowledged nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

LIMIT_BYTES = 16 << 20
"""Limit of a process. A message in a write has a second copy in gRPC, so the memory is up to twice as much."""
PARCEL_OVERHEAD_BYTES = 1 << 10
"""Charged for every parcel in addition to its bytes: its objects. Without this charge, parcels of one small event each
would take ten times the limit."""
MAX_BATCHES = 1 << 16
"""The most batches that all consumers of a process hold, apart from `MIN_BATCHES` for each. The record of a batch, its
cursor and its place in checkpoints take about 1 KiB."""
MIN_BATCHES = 16
"""Batches that a consumer may hold, however many the others hold."""
BATCH_SHARE = 4
LOOK_BYTES = 4 << 10
"""Waiting accounts are checked when this many bytes for each of them were freed, or a sixteenth of the limit."""


def _ignore() -> None: ...


class SendBudget:
    """The bytes that a process has handed to consumers and not sent yet."""

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self.limit = limit
        self.held = 0
        self.holders = 0
        """Number of clients that hold bytes."""
        self.clients: dict[Hashable, _ClientAccount] = {}
        self.waiting: dict[SendAccount, None] = {}
        """Accounts that wait for space, in the order in which they came."""
        self.batches = 0
        """Batches that consumers hold."""
        self._freed = 0
        """Bytes freed since the waiting accounts were checked last."""

    def account(self, client: Hashable = None) -> SendAccount:
        """The account of one consumer of a client, for example of a connection. Without a client, it has its own."""
        key = object() if client is None else client
        found = self.clients.setdefault(key, _ClientAccount(self, key))
        found.accounts += 1
        return SendAccount(self, found)

    def freed(self, size: int) -> None:
        """`size` bytes less are held: notify the waiting accounts that have space now.

        If many accounts wait, they are checked only after many bytes. Otherwise each message would cost a check of all.
        """
        if not self.waiting:
            return
        self._freed += size
        if self.held and self._freed < min(LOOK_BYTES * len(self.waiting), self.limit // 16):
            return
        self._freed = 0
        for account in list(self.waiting):
            account.wake()


class SendAccount:
    """The bytes of one consumer."""

    __slots__ = ("_budget", "_client", "_is_open", "_is_proven", "held", "on_space", "wanted")

    def __init__(self, budget: SendBudget, client: _ClientAccount) -> None:
        self.held = 0
        self.wanted = 0
        """Bytes that it waits for; 0: it does not wait."""
        self.on_space: Callable[[], None] = _ignore
        """Called once when there is space for `wanted` bytes."""
        self._budget = budget
        self._client = client
        self._is_open = True
        self._is_proven = False

    @property
    def space(self) -> int:
        """Bytes that the consumer may be handed now. A first batch may be larger."""
        budget, client = self._budget, self._client
        shared = (self._limit - budget.held) // (budget.holders + 1) - client.held
        return min(shared, (client.limit - client.held) // (client.holders + 1) - self.held)

    def fits(self, size: int) -> bool:
        """Whether the consumer may be handed a batch of `size` bytes."""
        if size <= self.space:
            return True
        budget, client = self._budget, self._client
        left = min(self._limit - budget.held, client.limit - client.held)
        if client.held:  # its consumers together leave a share to each other client, and to the next one
            left = min(left, self._limit // (budget.holders + 1) - client.held)
        return not self.held and (size <= left or not budget.held)

    @property
    def _limit(self) -> int:
        return self._budget.limit if self._is_proven else self._budget.limit // 2

    def wait(self, size: int, on_space: Callable[[], None]) -> None:
        """Call `on_space` once when `size` bytes fit."""
        self.wanted, self.on_space = max(size, 1), on_space
        self._budget.waiting[self] = None

    def stop_waiting(self) -> None:
        self.wanted = 0
        self._budget.waiting.pop(self, None)

    def wake(self) -> None:
        """Call `on_space` if the consumer waits and has space now."""
        if self.wanted and self.fits(self.wanted):
            self.stop_waiting()
            self.on_space()

    def add(self, size: int) -> None:
        """`size` bytes were handed to the consumer."""
        if size:
            self._client.add(size, 0 if self.held else 1)
            self.held += size

    def free(self, size: int) -> None:
        """`size` bytes were sent, or dropped."""
        if size:
            self.held -= size
            self._client.add(-size, 0 if self.held else -1)
            self.wake()
            self._budget.freed(size)

    @property
    def max_batches(self) -> int:
        """The most batches that the consumer may hold now."""
        limit = MAX_BATCHES if self._is_proven else MAX_BATCHES // 2
        return max(MIN_BATCHES, BATCH_SHARE * (limit - self._budget.batches))

    def hold_batches(self, more: int) -> None:
        """The consumer holds so many batches more; if negative, fewer."""
        self._budget.batches += more

    def prove(self) -> None:
        """The consumer has acknowledged or rejected something: it reads."""
        if not self._is_proven:
            self._is_proven = True
            self.wake()

    def close(self) -> None:
        """Free its bytes, and forget the client after its last account. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self.stop_waiting()
        self._client.accounts -= 1
        if not self._client.accounts:
            del self._budget.clients[self._client.key]
        self.free(self.held)


class _ClientAccount:
    """The bytes of all consumers of a client."""

    __slots__ = ("_budget", "accounts", "held", "holders", "key", "limit")

    def __init__(self, budget: SendBudget, key: Hashable) -> None:
        self.key = key
        self.limit = budget.limit // 2
        self.accounts = 0
        self.held = 0
        self.holders = 0
        """Number of consumers that hold bytes."""
        self._budget = budget

    def add(self, size: int, holders: int) -> None:
        budget, before = self._budget, self.held
        self.held += size
        self.holders += holders
        budget.held += size
        budget.holders += (self.held > 0) - (before > 0)
