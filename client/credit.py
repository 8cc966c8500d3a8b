"""How a consumer divides its credit among its sessions. Pure, without I/O and clock.

The credit that the consumer granted is free, or lent to one session. A session whose silo has events and no credit for
them is starved. The sessions that used credit lately, or were starved, share most of the credit equally. The others
keep a part, so that their next events need not wait. If a starved session does not get enough for one event, the others
are asked to give back their unused credit. So the credit of all sessions is never more than the consumer granted, and
even the smallest credit gets to the session that has events.
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
        "reclaiming",
        "starved",
        "used",
        "wanted_bytes",
        "wanted_events",
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
        self.wanted_bytes = 1
        """Bytes that its next event needs."""
        self.wanted_events = 1
        """More than one if several events come together."""
        self.reclaiming = False


class CreditLedger:
    """The credit of one consumer. Report what happens, then do what `decide` returns."""

    def __init__(self) -> None:
        self._free_events = 0
        self._free_bytes = 0
        self._accounts: dict[int, _Account] = {}
        self._starved: list[int] = []

    # ---- what happens ----------------------------------------------------------------------------------------------

    def grant(self, events: int, size: int) -> None:
        """The consumer grants credit. It only ever adds, up to `MAX_CREDIT`."""
        total = self.total
        self._free_events += max(0, min(events, MAX_CREDIT - total.events))
        self._free_bytes += max(0, min(size, MAX_CREDIT - total.bytes))

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

    def starve(self, session: int, wanted_bytes: int = 0, wanted_events: int = 0) -> None:
        """The session has events and no credit for them. The next one needs so many bytes and events, if known."""
        account = self._accounts[session]
        account.wanted_bytes, account.wanted_events = max(wanted_bytes, 1), max(wanted_events, 1)
        if not account.starved:
            account.starved = True
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
    def wanted_bytes(self) -> int:
        """Bytes that a waiting event needs, if that is more than the whole credit; otherwise 0."""
        accounts = self._accounts.values()
        wanted = max((account.wanted_bytes for account in accounts if account.starved), default=0)
        return wanted if wanted > self.total.bytes else 0

    @property
    def is_starved(self) -> bool:
        """Whether a session waits for credit."""
        return bool(self._starved)

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
        the consumer grants it again. Otherwise all do.
        """
        total, weights = self.total, sum(account.weight for account in self._accounts.values())
        loans: list[CreditGrant] = []
        short = False
        for session in list(self._starved):
            account = self._accounts[session]
            if account.reclaiming:
                continue  # the credit that it seems to have is on its way back
            loan = self._for_starved(session, account, total, account.weight / weights)
            if loan is None:
                short = True  # another one may need only what is left
                continue
            loans.append(loan)
            account.granted = True
            self._clear(session, account)
        if short:
            return CreditDecision(_merged(loans), self._to_reclaim(patient=patient))
        return CreditDecision(_merged([*loans, *self._spread(total, weights)]), ())

    def _for_starved(self, session: int, account: _Account, total: CreditAmount, share: float) -> CreditGrant | None:
        """As much of its share as is free; None if that is too little for one event."""
        events = max(account.wanted_events, int(total.events * share)) - account.events
        size = max(account.wanted_bytes, int(total.bytes * share)) - account.bytes
        events, size = max(0, min(events, self._free_events)), max(0, min(size, self._free_bytes))
        if account.events + events < account.wanted_events or account.bytes + size < account.wanted_bytes:
            return None
        return self._lend(session, account, events, size)

    def _lend(self, session: int, account: _Account, events: int, size: int) -> CreditGrant:
        account.events += events
        account.bytes += size
        account.lent = CreditAmount(account.events, account.bytes)
        self._free_events -= events
        self._free_bytes -= size
        return CreditGrant(session, events, size)

    def _to_reclaim(self, *, patient: bool) -> Sequence[int]:
        """The sessions whose credit another session needs more."""
        asked: list[int] = []
        for session, account in self._accounts.items():
            if patient and account.granted:
                continue  # it is about to use its credit
            busy = patient and account.weight > IDLE_WEIGHT
            much = account.events * 2 > account.lent.events or account.bytes * 2 > account.lent.bytes
            if (much if busy else account.events or account.bytes) and not (account.starved or account.reclaiming):
                account.reclaiming = True
                asked.append(session)
        return asked

    def _spread(self, total: CreditAmount, weights: float) -> Iterable[CreditGrant]:
        """Free credit goes to the sessions that have less than their share."""
        for session, account in self._accounts.items():
            share = account.weight / weights
            events = min(int(total.events * share) - account.events, self._free_events)
            size = min(int(total.bytes * share) - account.bytes, self._free_bytes)
            if not account.reclaiming and (events > 0 or size > 0):
                yield self._lend(session, account, max(events, 0), max(size, 0))


def _merged(loans: Iterable[CreditGrant]) -> Sequence[CreditGrant]:
    """One loan for each session."""
    merged: dict[int, CreditGrant] = {}
    for loan in loans:
        before = merged.get(loan.session, CreditGrant(loan.session, 0, 0))
        merged[loan.session] = CreditGrant(loan.session, before.events + loan.events, before.bytes + loan.bytes)
    return [loan for loan in merged.values() if loan.events or loan.bytes]
