"""How a consumer divides its credit among its sessions. Pure, without I/O and clock.

The credit that the consumer granted is free, or lent to one session. A session whose silo has events and no credit for
them is starved. The sessions that used credit lately, or were starved, share most of the credit equally. The others
keep a part, so that their next events need not wait. If a starved session does not get enough for its next batch, the
others are asked to give back their unused credit. So the credit of all sessions is never more than the consumer
granted, and even the smallest credit gets to the session that has events.

Small loans cost messages, and cut batches in parts. So a session gets more when half of its share is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

IDLE_WEIGHT = 0.25
"""Share of a session that did not use its credit. A session that did has 1."""
MAX_CREDIT = 1 << 62
"""Most events, and most bytes, of a consumer's credit."""


class CreditAmount(NamedTuple):
    """Events, and bytes on the wire."""

    events: int = 0
    bytes: int = 0


NOTHING = CreditAmount()


class CreditGrant(NamedTuple):
    """Credit to be given to a session."""

    session: int
    events: int
    bytes: int


class CreditDecision(NamedTuple):
    """What a ledger decides."""

    loans: Sequence[CreditGrant]
    reclaim: Sequence[int]
    """Sessions that are to give back their unused credit."""


class _Account:
    """The credit of one session."""

    __slots__ = (
        "bytes",
        "events",
        "granted",
        "lent",
        "needed",
        "reclaiming",
        "starved",
        "used",
        "wait",
        "wanted",
        "weight",
    )

    def __init__(self) -> None:
        self.events = 0
        self.bytes = 0
        self.lent = CreditAmount()
        """Its credit after the last loan."""
        self.weight = 1.0
        self.used = False
        """Whether it used credit since a session was starved."""
        self.starved = False
        self.granted = False
        """It was starved, and has used nothing since it got credit."""
        self.needed = CreditAmount(1, 1)
        """The least with which it can send its next events. More than one event if several come together."""
        self.wanted = CreditAmount()
        """Its next batch comes whole with so much."""
        self.wait = 0
        """Number of its last wait for credit."""
        self.reclaiming = False


class CreditLedger:
    """The credit of one consumer. Report what happens, then do what `decide` returns."""

    def __init__(self) -> None:
        self._free_events = 0
        self._free_bytes = 0
        self._most = CreditAmount()
        """The most that there was at any time."""
        self._accounts: dict[int, _Account] = {}
        self._starved: list[int] = []
        self._waits = 0
        """Number of the last wait for credit."""

    # ---- what happens ----------------------------------------------------------------------------------------------

    def grant(self, events: int, size: int) -> None:
        """The consumer grants credit. It only ever adds, up to `MAX_CREDIT`."""
        total = self.total
        self._free_events += max(0, min(events, MAX_CREDIT - total.events))
        self._free_bytes += max(0, min(size, MAX_CREDIT - total.bytes))
        self._most = CreditAmount(*map(max, self._most, self.total))

    def join(self, session: int) -> None:
        """Credit may be lent to this session. Idempotent."""
        self._accounts.setdefault(session, _Account())

    def leave(self, session: int) -> None:
        """The session sends nothing more, and its credit is free. Idempotent."""
        account = self._accounts.pop(session, None)
        if account is not None:
            self._free_events += account.events
            self._free_bytes += account.bytes
            self._clear(session, account)

    def use(self, session: int, events: int, size: int) -> None:
        """The session sent so much."""
        account = self._accounts[session]
        account.events -= events
        account.bytes -= size
        account.used, account.granted = True, False

    def starve(self, session: int, needed: CreditAmount = NOTHING, wanted: CreditAmount = NOTHING) -> None:
        """The session has events and no credit for them. The next ones need at least `needed`, and come whole
        with `wanted`, if these are known."""
        account = self._accounts[session]
        account.needed = CreditAmount(max(needed.events, 1), max(needed.bytes, 1))
        if not account.starved:
            account.starved, account.wanted = True, wanted
            self._waits = account.wait = self._waits + 1
            self._starved.append(session)
            self._weigh(account)

    def give_back(self, session: int, events: int, size: int) -> None:
        """The session answers that it gave back so much."""
        account = self._accounts[session]
        account.reclaiming = account.granted = False
        account.events -= events
        account.bytes -= size
        self._free_events += events
        self._free_bytes += size

    def take_free(self) -> CreditAmount:
        """The consumer takes back the credit that is lent to no session."""
        free = CreditAmount(self._free_events, self._free_bytes)
        self._free_events = self._free_bytes = 0
        self._most = self.total
        return free

    @property
    def total(self) -> CreditAmount:
        """How much may still be sent, by all sessions together."""
        accounts = self._accounts.values()
        return CreditAmount(
            self._free_events + sum(each.events for each in accounts),
            self._free_bytes + sum(each.bytes for each in accounts),
        )

    @property
    def needed_bytes(self) -> int:
        """Bytes that a waiting event needs, if that is more than the whole credit; otherwise 0."""
        accounts = self._accounts.values()
        needed = max((account.needed.bytes for account in accounts if account.starved), default=0)
        return needed if needed > self.total.bytes else 0

    @property
    def is_starved(self) -> bool:
        """Whether a session waits for credit."""
        return bool(self._starved)

    @property
    def longest_wait(self) -> int:
        """Number of the wait of the session that waits longest for credit; 0 if none waits."""
        return self._accounts[self._starved[0]].wait if self._starved else 0

    def _weigh(self, starved: _Account) -> None:
        """A session is starved: those that used nothing since the last time get less."""
        for account in self._accounts.values():
            account.weight = 1.0 if account is starved or account.used or account.starved else IDLE_WEIGHT
            account.used = False

    def _clear(self, session: int, account: _Account) -> None:
        if account.starved:
            account.starved = False
            self._starved.remove(session)

    # ---- what follows ----------------------------------------------------------------------------------------------

    def decide(self, *, patient: bool = True) -> CreditDecision:
        """Return the loans to be made now, which count from now on, and the sessions that are to give credit back.

        With `patient`, only sessions with much unused credit give it back: the others are about to use theirs, and then
        the consumer grants it again. And starved sessions wait for enough credit for a whole batch. Otherwise all give
        it back, and no session waits for more than it needs.
        """
        total, weights = self.total, sum(account.weight for account in self._accounts.values())
        loans: list[CreditGrant] = []
        short = urgent = False
        for session in list(self._starved):
            account = self._accounts[session]
            if account.reclaiming:
                continue  # the credit that it seems to have is on its way back
            if not patient:
                account.wanted = NOTHING  # until its next wait: others could take credit faster than it becomes enough
            loan = self._for_starved(session, account, total, account.weight / weights)
            if loan is None:
                short = True  # another session may need no more than the rest
                urgent |= self._is_urgent(account, total)
                continue
            loans.append(loan)
            account.granted = True
            self._clear(session, account)
        if short:
            return CreditDecision(_merged(loans), self._to_reclaim(patient=patient, urgent=urgent))
        return CreditDecision(_merged([*loans, *self._spread(total, weights)]), ())

    def _for_starved(self, session: int, account: _Account, total: CreditAmount, share: float) -> CreditGrant | None:
        """As much of its share as is free; None if that is too little."""
        wanted = self._wanted(account, total)
        events = max(wanted.events, int(total.events * share)) - account.events
        size = max(wanted.bytes, int(total.bytes * share)) - account.bytes
        events, size = max(0, min(events, self._free_events)), max(0, min(size, self._free_bytes))
        if account.events + events < wanted.events or account.bytes + size < wanted.bytes:
            return None
        return self._lend(session, account, events, size)

    def _wanted(self, account: _Account, total: CreditAmount) -> CreditAmount:
        """The credit without which the session waits: for a whole batch if there is so much, or is about to be, because
        a consumer grants its credit again by quarters."""
        there = (max(now, most // 4) for now, most in zip(total, self._most, strict=True))
        return CreditAmount(*map(max, account.needed, map(min, account.wanted, there)))

    def _lend(self, session: int, account: _Account, events: int, size: int) -> CreditGrant:
        account.events += events
        account.bytes += size
        account.lent = CreditAmount(account.events, account.bytes)
        self._free_events -= events
        self._free_bytes -= size
        return CreditGrant(session, events, size)

    def _is_urgent(self, account: _Account, total: CreditAmount) -> bool:
        """Whether a session that gets no loan can send nothing, or the consumer has too little to grant before that."""
        has = CreditAmount(account.events + self._free_events, account.bytes + self._free_bytes)
        can_send = has.events >= account.needed.events and has.bytes >= account.needed.bytes
        return not can_send or all(now * 4 > most * 3 for now, most in zip(total, self._most, strict=True))

    def _to_reclaim(self, *, patient: bool, urgent: bool) -> Sequence[int]:
        """The sessions whose credit another session needs more. Of those that are starved, the first keeps its own."""
        asked: list[int] = []
        for session, account in self._accounts.items():
            if account.reclaiming or session == self._starved[0] or (patient and account.granted):
                continue  # those with a grant are about to use it
            busy = patient and account.weight > IDLE_WEIGHT
            if busy and not urgent:
                continue
            much = account.events * 2 > account.lent.events or account.bytes * 2 > account.lent.bytes
            if much if busy and not account.starved else account.events or account.bytes:
                account.reclaiming = True
                asked.append(session)
        return asked

    def _spread(self, total: CreditAmount, weights: float) -> Iterable[CreditGrant]:
        """Free credit goes to the sessions that have less than half of their share."""
        alone = len(self._accounts) == 1
        for session, account in self._accounts.items():
            share = account.weight / weights
            events, size = int(total.events * share), int(total.bytes * share)
            if account.reclaiming or (not alone and account.events * 2 > events and account.bytes * 2 > size):
                continue
            events, size = min(events - account.events, self._free_events), min(size - account.bytes, self._free_bytes)
            if events > 0 or size > 0:
                yield self._lend(session, account, max(events, 0), max(size, 0))


def _merged(loans: Iterable[CreditGrant]) -> Sequence[CreditGrant]:
    """One loan for each session."""
    merged: dict[int, CreditGrant] = {}
    for loan in loans:
        before = merged.get(loan.session, CreditGrant(loan.session, 0, 0))
        merged[loan.session] = CreditGrant(loan.session, before.events + loan.events, before.bytes + loan.bytes)
    return [loan for loan in merged.values() if loan.events or loan.bytes]
