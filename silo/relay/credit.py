"""How a consumer's credit is divided among the silos that deliver to it. Pure.

What a consumer granted is free, or lent to one silo, which may send so much. A silo that has something to deliver and
no credit for it is hungry. The silos that used credit of late, or were hungry, share most of it equally; the others
keep a part, so that what comes there next need not wait. Where that leaves a hungry silo without enough for one event,
the others are asked to give back what they have not used. So the sum of what may be sent is never more than what the
consumer granted, and the smallest credit still gets to where something waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

IDLE = 0.25
"""The share of a silo that did not use its credit, where one that did has 1."""


MOST = 1 << 62


class Credit(NamedTuple):
    """Events, and bytes on the wire."""

    events: int = 0
    bytes: int = 0


class Loan(NamedTuple):
    """Credit that a silo is to be given."""

    silo: str
    events: int
    bytes: int


class Decision(NamedTuple):
    loans: Sequence[Loan]
    reclaim: Sequence[str]
    """Silos that are to give back what they have not used."""


class _Account:
    """One silo's."""

    __slots__ = (
        "bytes",
        "events",
        "fed",
        "filled",
        "hungry",
        "needed",
        "needed_events",
        "reclaiming",
        "used",
        "weight",
    )

    def __init__(self) -> None:
        self.events = 0
        self.bytes = 0
        self.filled = Credit()
        """What it had when it was lent something last."""
        self.weight = 1.0
        self.used = False
        """Since somebody was hungry."""
        self.hungry = False
        self.fed = False
        """It was hungry, and has used nothing since it was given something."""
        self.needed = 1
        """Bytes for its next event."""
        self.needed_events = 1
        """More than one where they come together."""
        self.reclaiming = False


class Ledger:
    """The credit of one consumer. Tell it what happens, then do what `decide` says."""

    def __init__(self) -> None:
        self._free_events = 0
        self._free_bytes = 0
        self._accounts: dict[str, _Account] = {}
        self._hungry: list[str] = []

    # ---- what happens ----------------------------------------------------------------------------------------------

    def granted(self, events: int, size: int) -> None:
        """By the consumer. It only ever adds, up to `MOST`."""
        total = self.total
        self._free_events += max(0, min(events, MOST - total.events))
        self._free_bytes += max(0, min(size, MOST - total.bytes))

    def joined(self, silo: str) -> None:
        """A silo may be lent something."""
        self._accounts[silo] = _Account()

    def left(self, silo: str) -> None:
        """It sends nothing more: what it had is free. Idempotent."""
        account = self._accounts.pop(silo, None)
        if account is not None:
            self._free_events += account.events
            self._free_bytes += account.bytes
            self._sated(silo, account)

    def used(self, silo: str, events: int, size: int) -> None:
        """It sent so much."""
        account = self._accounts[silo]
        account.events -= events
        account.bytes -= size
        account.used, account.fed = True, False

    def hungry(self, silo: str, needed: int = 0, events: int = 0) -> None:
        """It has something to deliver and no credit for it; what is next needs so many bytes and events, where that is
        known."""
        account = self._accounts[silo]
        account.needed, account.needed_events = max(needed, 1), max(events, 1)
        if not account.hungry:
            account.hungry = True
            self._hungry.append(silo)
            self._weigh(account)

    def returned(self, silo: str, events: int, size: int) -> None:
        """What it was asked to give back."""
        account = self._accounts[silo]
        account.reclaiming = account.fed = False
        account.events -= events
        account.bytes -= size
        self._free_events += events
        self._free_bytes += size

    def take_free(self) -> Credit:
        """The consumer takes back what is lent to nobody."""
        free = Credit(self._free_events, self._free_bytes)
        self._free_events = self._free_bytes = 0
        return free

    @property
    def total(self) -> Credit:
        """What may still be sent, by whomever."""
        accounts = self._accounts.values()
        return Credit(
            self._free_events + sum(each.events for each in accounts),
            self._free_bytes + sum(each.bytes for each in accounts),
        )

    @property
    def needed(self) -> int:
        """More bytes than the consumer's whole credit are needed for an event that waits; 0: they are not."""
        needed = max((account.needed for account in self._accounts.values() if account.hungry), default=0)
        return needed if needed > self.total.bytes else 0

    def _weigh(self, hungry: _Account) -> None:
        """Somebody is hungry: who used nothing since the last time gets less."""
        for account in self._accounts.values():
            account.weight = 1.0 if account is hungry or account.used or account.hungry else IDLE
            account.used = False

    def _sated(self, silo: str, account: _Account) -> None:
        if account.hungry:
            account.hungry = False
            self._hungry.remove(silo)

    # ---- what follows ----------------------------------------------------------------------------------------------

    def decide(self, *, patient: bool = True) -> Decision:
        """What to lend now, which then counts as lent, and who is to be asked to give back: with `patient` whoever has
        much left, for the others are going to use theirs, and the consumer to grant it again; else all."""
        total, weights = self.total, sum(account.weight for account in self._accounts.values())
        loans: list[Loan] = []
        for silo in list(self._hungry):
            account = self._accounts[silo]
            if account.reclaiming:
                continue  # what it seems to have is on its way back
            loan = self._for_hungry(silo, account, total, account.weight / weights)
            if loan is None:
                return Decision(loans, self._to_reclaim(patient=patient))
            loans.append(loan)
            account.fed = True
            self._sated(silo, account)
        return Decision(_merged([*loans, *self._spread(total, weights)]), ())

    def _for_hungry(self, silo: str, account: _Account, total: Credit, share: float) -> Loan | None:
        """Its share, as far as there is so much; None where that is too little for one event."""
        events = max(account.needed_events, int(total.events * share)) - account.events
        size = max(account.needed, int(total.bytes * share)) - account.bytes
        events, size = max(0, min(events, self._free_events)), max(0, min(size, self._free_bytes))
        if account.events + events < account.needed_events or account.bytes + size < account.needed:
            return None
        return self._lend(silo, account, events, size)

    def _lend(self, silo: str, account: _Account, events: int, size: int) -> Loan:
        account.events += events
        account.bytes += size
        account.filled = Credit(account.events, account.bytes)
        self._free_events -= events
        self._free_bytes -= size
        return Loan(silo, events, size)

    def _to_reclaim(self, *, patient: bool) -> Sequence[str]:
        """Who has something that another needs more."""
        asked: list[str] = []
        for silo, account in self._accounts.items():
            if patient and account.fed:
                continue  # it is about to use what it was given
            busy = patient and account.weight > IDLE
            much = account.events * 2 > account.filled.events or account.bytes * 2 > account.filled.bytes
            if (much if busy else account.events or account.bytes) and not (account.hungry or account.reclaiming):
                account.reclaiming = True
                asked.append(silo)
        return asked

    @property
    def is_hungry(self) -> bool:
        """Somebody waits for credit."""
        return bool(self._hungry)

    def _spread(self, total: Credit, weights: float) -> Iterable[Loan]:
        """What is free goes to those that have less than their share."""
        for silo, account in self._accounts.items():
            share = account.weight / weights
            events = min(int(total.events * share) - account.events, self._free_events)
            size = min(int(total.bytes * share) - account.bytes, self._free_bytes)
            if not account.reclaiming and (events > 0 or size > 0):
                yield self._lend(silo, account, max(events, 0), max(size, 0))


def _merged(loans: Sequence[Loan]) -> Sequence[Loan]:
    """One for each silo."""
    merged: dict[str, Loan] = {}
    for loan in loans:
        before = merged.get(loan.silo, Loan(loan.silo, 0, 0))
        merged[loan.silo] = Loan(loan.silo, before.events + loan.events, before.bytes + loan.bytes)
    return [loan for loan in merged.values() if loan.events or loan.bytes]
