"""The control store as plain data. Most simulations run on it, because it is much faster than a database.

It has those methods that managers and memberships call, with the semantics of `ControlStore` and `ClusterStore`:
`test_memory_store.py` compares the two step by step. Nothing in a method waits, so each is one transaction.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from headrace import (
    DeadLetter,
    DefinitionConflict,
    Fenced,
    GapRecord,
    InvalidArgument,
    NotFound,
    SubscriptionDefinition,
)
from headrace.store.cluster_store import ENOUGH_VOTES
from headrace.store.rows import differences, plain, printable
from headrace.streams.cluster import LIVING, ClusterView, Lease, SiloRecord, SiloState, SiloSuperseded
from headrace.streams.progress import ControlRequests, RefusedProgress, SubscriptionAttachment
from headrace.streams.subscriptions import (
    Checkpoint,
    is_consumers_position,
    is_position_of,
    parent_name,
    parent_of,
    redefined,
)

Clock = Callable[[Any], int]
Progress = Sequence[tuple[str, int, Mapping[int, Checkpoint]]]
Letter = tuple[Any, ...]
"""The identity of a dead letter."""


class Subscription:
    def __init__(self, definition: SubscriptionDefinition) -> None:
        self.definition = definition
        self.epoch = 0
        self.generation = 0
        self.written: dict[int, tuple[int, Checkpoint]] = {}
        """Epoch and checkpoint by queue."""
        self.revisions: dict[int, tuple[int, int]] = {}
        """Lease epoch and revision of these checkpoints."""

    @property
    def checkpoints(self) -> dict[int, Checkpoint]:
        return plain({queue: self.written[queue][1] for queue in sorted(self.written)})

    def write(
        self,
        epoch: int,
        positions: Mapping[int, Checkpoint],
        leases: Mapping[int, int] | None = None,
        revision: int = 0,
    ) -> None:
        for queue, position in positions.items():
            before, of = self.written.get(queue), ((leases or {}).get(queue, 0), revision)
            late = before is not None and (
                position.next_offset < before[1].next_offset or of < self.revisions.get(queue, (0, 0))
            )
            if before is None or epoch > before[0] or not late:
                self.revisions[queue] = of
                behind = {at: one._replace(paused=printable(one.paused)) for at, one in position.behind.items()}
                self.written[queue] = epoch, Checkpoint(position.next_offset, behind)


class MemoryStore:
    """As `ControlStore`."""

    private = False

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, str], Subscription] = {}
        self._epoch = 0
        self._first_generation = 0
        self._letters: dict[int, DeadLetter] = {}
        self._ids: dict[Letter, int] = {}
        self._last_id = 0
        self._gaps: dict[tuple[Any, ...], GapRecord] = {}
        self._stopped: set[tuple[str, int]] = set()
        self._members = Members()

    def cluster(self, clock: Clock) -> "MemoryClusterStore":
        return MemoryClusterStore(self._members, clock)

    async def aclose(self) -> None: ...

    # Subscriptions and their progress

    async def create_subscription(
        self, provider: str, definition: SubscriptionDefinition, start: Mapping[int, Checkpoint]
    ) -> bool:
        if is_consumers_position(definition):
            parent = parent_of(definition)
            if self._get(provider, parent.name).definition != parent:
                raise redefined(parent.name)
        found = self.by_name.get((provider, definition.name))
        if found is None:
            made = self.by_name[provider, definition.name] = Subscription(definition)
            made.epoch, made.generation = self._next_epoch(), self._first_generation
            made.write(made.epoch, start)
            return True
        if found.definition != definition:
            raise DefinitionConflict(
                f"subscription {parent_name(definition.name)!r} exists with another definition: "
                f"{differences(found.definition, definition)}; give the stored values, use another name, or give its "
                "progress up with 'headrace subscriptions delete' and create it again"
            )
        return False

    async def delete_subscription(self, provider: str, name: str) -> None:
        self._get(provider, name)
        for of, each in list(self.by_name):
            if of == provider and (each == name or is_position_of(each, name)):
                self._delete(provider, each)

    def _delete(self, provider: str, name: str) -> None:
        self._first_generation = max(self._first_generation, self._get(provider, name).generation + 1)
        del self.by_name[provider, name]
        self._gaps = {
            key: gap for key, gap in self._gaps.items() if (gap.provider, gap.subscription) != (provider, name)
        }
        for number in self._chosen(provider, name, None):
            self._letters[number] = self._letters[number]._replace(redrive=False)

    async def subscription(self, provider: str, name: str) -> SubscriptionDefinition:
        return self._get(provider, name).definition

    async def subscriptions(self, provider: str) -> Sequence[SubscriptionDefinition]:
        return [found.definition for (of, _), found in sorted(self.by_name.items()) if of == provider]

    def _get(self, provider: str, name: str) -> Subscription:
        found = self.by_name.get((provider, name))
        if found is None:
            raise NotFound(f"provider {provider!r} has no subscription {name!r}")
        return found

    async def attach(self, provider: str, name: str, *, exclusive: bool = True) -> SubscriptionAttachment:
        found = self._get(provider, name)
        if exclusive:
            found.epoch = self._next_epoch()
        return SubscriptionAttachment(found.epoch, found.checkpoints, found.generation, found.definition)

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    async def generation(self, provider: str, name: str) -> int:
        return self._get(provider, name).generation

    async def seek(self, provider: str, name: str, positions: Mapping[int, Checkpoint], reason: str) -> int:
        found = self._get(provider, name)
        found.epoch = self._next_epoch()
        found.generation += 1
        found.write(found.epoch, positions)
        return found.epoch

    async def save_checkpoints(
        self, provider: str, progress: Progress, leases: Mapping[int, int] | None = None, *, revision: int = 0
    ) -> RefusedProgress:
        refused = self._refused(provider, {queue for _, _, each in progress for queue in each}, leases)
        stale = list[str]()
        for name, epoch, positions in progress:
            found = self.by_name.get((provider, name))
            if found is None or found.epoch != epoch:
                stale.append(name)
            else:
                allowed = {queue: at for queue, at in positions.items() if queue not in refused}
                found.write(epoch, allowed, leases, revision)
        return RefusedProgress(stale, refused)

    def _refused(self, provider: str, queues: Collection[int], leases: Mapping[int, int] | None) -> frozenset[int]:
        if leases is None:
            return frozenset()
        return frozenset(queue for queue in queues if not self._holds(provider, queue, leases.get(queue)))

    def _holds(self, provider: str, queue: int, epoch: int | None) -> bool:
        lease = self._members.leases.get((provider, queue))
        return lease is not None and lease.owner != "" and lease.epoch == epoch

    async def checkpoints(self, provider: str, name: str) -> Mapping[int, Checkpoint]:
        return self._get(provider, name).checkpoints

    async def checkpoints_of_queue(self, provider: str, queue: int) -> dict[str, Checkpoint]:
        every = ((name, found.written.get(queue)) for (of, name), found in self.by_name.items() if of == provider)
        return {name: plain({0: row[1]})[0] for name, row in every if row is not None}

    async def watermarks(self, provider: str, *, apart_from: Sequence[str] = ()) -> dict[int, int]:
        lowest: dict[int, int] = {}
        for (of, name), found in self.by_name.items():
            if of == provider and name not in apart_from:
                for queue, (_, at) in found.written.items():
                    lowest[queue] = min(at.watermark, lowest.get(queue, at.watermark))
        return lowest

    async def control_requests(self, provider: str, names: Sequence[str]) -> ControlRequests:
        found = {name: self.by_name.get((provider, name)) for name in names}
        epochs = {name: one.epoch for name, one in found.items() if one is not None}
        return ControlRequests(epochs, frozenset(queue for of, queue in self._stopped if of == provider))

    async def stop_queues(self, provider: str, queues: Sequence[int]) -> None:
        self._stopped.update((provider, queue) for queue in queues)

    async def start_queues(self, provider: str, queues: Sequence[int]) -> None:
        self._stopped.difference_update((provider, queue) for queue in queues)

    # Dead letters and gaps

    def _require_leases(self, of: Iterable[DeadLetter] | Iterable[GapRecord], leases: Mapping[int, int] | None) -> None:
        queues: dict[str, set[int]] = {}
        for record in of:
            queues.setdefault(record.provider, set()).add(record.queue)
        for provider in sorted(queues):
            if refused := self._refused(provider, queues[provider], leases):
                raise Fenced(
                    f"the lease of {provider!r} on queues {sorted(refused)} is lost: another silo may have them"
                )

    async def add_dead_letters(
        self, letters: Sequence[DeadLetter], epoch: int | None, leases: Mapping[int, int] | None = None
    ) -> list[int]:
        self._require_epoch(letters, epoch)
        self._require_leases(letters, leases)
        return [self._add_dead_letter(letter) for letter in letters]

    def _require_epoch(self, records: Sequence[DeadLetter] | Sequence[GapRecord], epoch: int | None) -> None:
        if epoch is None or not records:
            return
        of = {(record.provider, record.subscription) for record in records}
        if len(of) > 1:
            raise InvalidArgument(f"an epoch belongs to one subscription, these records to {len(of)}: {sorted(of)}")
        ((provider, name),) = of
        found = self.by_name.get((provider, name))
        if found is None:
            raise Fenced(f"subscription {name!r} of {provider!r} has been deleted")
        if found.epoch != epoch:
            at = f"at epoch {found.epoch}, not {epoch}"
            raise Fenced(f"subscription {name!r} of {provider!r} is {at}: another process took it over")

    def _add_dead_letter(self, letter: DeadLetter) -> int:
        key = _identity(letter)
        reason = printable(letter.reason)
        if (known := self._ids.get(key)) is not None:
            self._letters[known] = self._letters[known]._replace(
                reason=reason, attempts=letter.attempts, failed_at_us=letter.failed_at_us
            )
            self._last_id += 1  # SQLite uses a number up all the same
            return known
        self._last_id += 1
        self._ids[key] = self._last_id
        self._letters[self._last_id] = letter._replace(id=self._last_id, reason=reason)
        return self._last_id

    async def dead_letters(
        self, provider: str, subscription: str | None = None, *, limit: int = 100, after_id: int = 0
    ) -> list[DeadLetter]:
        found = [
            letter
            for number, letter in sorted(self._letters.items())
            if letter.provider == provider and number > after_id and subscription in (None, letter.subscription)
        ]
        return found[:limit]

    def watch_redrives(self, notify: Callable[[], None]) -> None: ...

    async def request_redrive(self, provider: str, subscription: str, ids: Sequence[int] | None = None) -> int:
        matches = self._get(provider, subscription).definition.selector.matcher()
        chosen = [n for n in self._chosen(provider, subscription, ids) if matches(self._letters[n].stream)]
        for number in chosen:
            self._letters[number] = self._letters[number]._replace(redrive=True)
        return len(chosen)

    def _chosen(self, provider: str, subscription: str, ids: Sequence[int] | None) -> list[int]:
        return [
            number
            for number, letter in self._letters.items()
            if (letter.provider, letter.subscription) == (provider, subscription) and (ids is None or number in ids)
        ]

    async def redrives(
        self, provider: str, names: Sequence[str], *, queues: Collection[int] | None = None, limit: int = 100
    ) -> list[DeadLetter]:
        letters = (letter for _, letter in sorted(self._letters.items()) if letter.provider == provider)
        asked = (letter for letter in letters if letter.redrive and letter.subscription in names)
        return [letter for letter in asked if queues is None or letter.queue in queues][:limit]

    async def requested_redrives(
        self, provider: str, name: str, queue: int, first: int, last: int
    ) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for letter in self._letters.values():
            offset, index = letter.token
            here = (letter.provider, letter.subscription, letter.queue) == (provider, name, queue)
            if letter.redrive and here and first <= offset <= last:
                found.setdefault(offset, []).append(index)
        return found

    async def finish_redrive(
        self, letter_id: int, *, delivered: bool, reason: str | None, attempts: int, failed_at_us: int
    ) -> None:
        letter = self._letters.get(letter_id)
        if letter is None:
            return
        if delivered:
            del self._letters[letter_id]
            del self._ids[_identity(letter)]
            return
        why = letter.reason if reason is None else printable(reason)
        self._letters[letter_id] = letter._replace(
            redrive=False, attempts=attempts, reason=why, failed_at_us=failed_at_us
        )

    async def add_gaps(
        self, records: Sequence[GapRecord], epoch: int | None = None, leases: Mapping[int, int] | None = None
    ) -> None:
        self._require_epoch(records, epoch)
        self._require_leases(records, leases)
        for record in records:
            key = record.provider, record.subscription, record.queue, record.stream, record.low, record.high
            stored = record._replace(reason=printable(record.reason))
            known = self._gaps.get(key)
            if known is None or known.reason != stored.reason:
                self._gaps[key] = stored

    async def gaps(self, provider: str, subscription: str | None = None) -> list[GapRecord]:
        found = [gap for gap in self._gaps.values() if gap.provider == provider]
        return [gap for gap in found if subscription in (None, gap.subscription)]


def _identity(letter: DeadLetter) -> Letter:
    return (
        letter.provider, letter.subscription, letter.queue, letter.token, letter.timestamp_us, letter.stream,
        letter.payload, tuple(letter.headers.items()), letter.event_id,
    )  # fmt: skip


@dataclass
class Members:
    incarnation: int = 0
    silos: dict[str, SiloRecord] = field(default_factory=dict[str, SiloRecord])
    leases: dict[tuple[str, int], Lease] = field(default_factory=dict[tuple[str, int], Lease])
    votes: dict[str, dict[str, tuple[int, int, int]]] = field(
        default_factory=dict[str, dict[str, tuple[int, int, int]]]
    )
    """By silo and voter: the incarnations of both, and the heartbeat of the silo."""


class MemoryClusterStore:
    """As `ClusterStore`."""

    def __init__(self, members: Members, clock: Clock) -> None:
        self._members = members
        self.leases, self._silos, self._votes = members.leases, members.silos, members.votes
        self.now = clock

    async def join(
        self,
        name: str,
        address: str,
        serves: Sequence[str],
        settings: Mapping[str, str] = MappingProxyType({}),
        process: str = "",
        *,
        public_address: str = "",
    ) -> SiloRecord:
        self._members.incarnation += 1
        now = self.now(None)
        me = SiloRecord(
            name, self._members.incarnation, address, tuple(serves), SiloState.ACTIVE, now, now,
            settings=dict(settings), process=process, public_address=public_address,
        )  # fmt: skip
        self._silos[name] = me
        self._votes.pop(name, None)
        return me

    def _living(self, silo: SiloRecord) -> SiloRecord | None:
        now = self._silos.get(silo.name)
        return now if now is not None and now.incarnation == silo.incarnation and now.state in LIVING else None

    def _require(self, silo: SiloRecord) -> SiloRecord:
        living = self._living(silo)
        if living is None:
            raise self._fenced(silo)
        return living

    def _fenced(self, silo: SiloRecord) -> Fenced:
        who, now = f"silo {silo.name!r}, incarnation {silo.incarnation},", self._silos.get(silo.name)
        if now is None:
            return Fenced(f"{who} is no member of the cluster any more: join again")
        if now.incarnation != silo.incarnation:
            return SiloSuperseded(
                f"{who} is superseded by incarnation {now.incarnation}: another process uses its name"
            )
        if now.state is SiloState.DEAD:
            return Fenced(f"{who} was declared dead by its peers: join again")
        return Fenced(f"{who} has left the cluster: join again")

    def _held_by(self, silo: SiloRecord) -> list[Lease]:
        mine = silo.name, silo.incarnation
        return [lease for lease in self.leases.values() if (lease.owner, lease.incarnation) == mine]

    def keep(self, lease: Lease) -> None:
        self.leases[lease.provider, lease.queue] = lease

    async def beat(self, me: SiloRecord, lease_s: float) -> ClusterView:
        now = self.now(None)
        living = self._require(me)
        self._silos[me.name] = living._replace(heartbeat_at_us=now, heartbeats=living.heartbeats + 1)
        for lease in self._held_by(me):
            self.keep(lease._replace(renewals=lease.renewals + 1, length_us=_us(lease_s)))
        return self.look(now)

    async def view(self) -> ClusterView:
        return self.look(self.now(None))

    def look(self, now: int) -> ClusterView:
        silos = [silo for _, silo in sorted(self._silos.items())]
        return ClusterView(now, silos, [lease for _, lease in sorted(self.leases.items())])

    async def acquire(
        self,
        me: SiloRecord,
        wanted: Sequence[tuple[str, int]],
        lease_s: float,
        homes: Mapping[tuple[str, int], str] | None = None,
        over: Collection[Lease] = (),
    ) -> list[Lease]:
        if self._require(me).state is not SiloState.ACTIVE:
            return []
        homes, ended = homes or {}, {(one.provider, one.queue): (one.epoch, one.renewals) for one in over}
        granted = [self.grant(me, queue, ended.get(queue), homes.get(queue, "")) for queue in sorted(set(wanted))]
        leases = [lease._replace(length_us=_us(lease_s)) for lease in granted if lease is not None]
        for lease in leases:
            self.keep(lease)
        return leases

    def grant(self, me: SiloRecord, queue: tuple[str, int], ended: tuple[int, int] | None, home: str) -> Lease | None:
        lease = self.leases.get(queue) or Lease(*queue, "", 0, 0, 0)
        mine = (lease.owner, lease.incarnation) == (me.name, me.incarnation)
        if lease.owner and (lease.epoch, lease.renewals) != ended and not mine:
            return None
        epoch, renewals = lease.epoch + 1, lease.renewals + 1
        return lease._replace(owner=me.name, incarnation=me.incarnation, epoch=epoch, renewals=renewals, home=home)

    async def settle(self, me: SiloRecord, homes: Mapping[tuple[str, int], str]) -> None:
        for lease in self._held_by(me):
            if (home := homes.get((lease.provider, lease.queue))) is not None:
                self.keep(lease._replace(home=home))

    async def release(self, me: SiloRecord, held: Sequence[Lease]) -> None:
        released = {(lease.provider, lease.queue, lease.epoch) for lease in held}
        for lease in self._held_by(me):
            if (lease.provider, lease.queue, lease.epoch) in released:
                self.keep(_nobodys(lease))

    async def leaving(self, me: SiloRecord) -> None:
        self._silos[me.name] = self._require(me)._replace(state=SiloState.LEAVING)

    async def leave(self, me: SiloRecord) -> None:
        self._end(me, SiloState.LEFT)

    async def declare_dead(self, silo: SiloRecord) -> None:
        self._end(silo, SiloState.DEAD)

    def _end(self, silo: SiloRecord, state: SiloState) -> None:
        if (living := self._living(silo)) is not None:
            self._silos[silo.name] = living._replace(state=state)
            self._votes.pop(silo.name, None)
        for lease in self._held_by(silo):
            self.keep(_nobodys(lease))

    async def suspect(self, me: SiloRecord, suspect: SiloRecord, peers: Collection[str]) -> bool:
        self._require(me)
        living = self._living(suspect)
        if living is None or me.name == suspect.name or living.heartbeats != suspect.heartbeats:
            return False
        votes = self._votes.setdefault(suspect.name, {})
        votes[me.name] = suspect.incarnation, me.incarnation, suspect.heartbeats
        if not self._outvoted(me, suspect, peers):
            return False
        self._silos[suspect.name] = living._replace(state=SiloState.DEAD)
        self._votes.pop(suspect.name, None)
        return True

    def _outvoted(self, me: SiloRecord, suspect: SiloRecord, others: Collection[str]) -> bool:
        peers = {
            silo.name: silo.incarnation
            for silo in self._silos.values()
            if silo.state in LIVING and silo.name != suspect.name and (silo.name == me.name or silo.name in others)
        }
        at = suspect.incarnation, suspect.heartbeats
        votes = self._votes[suspect.name].items()
        against = [v for v, (of, by, heartbeats) in votes if (of, heartbeats) == at and peers.get(v) == by]
        return len(against) >= min(ENOUGH_VOTES, len(peers))

    async def remove(self, silo: SiloRecord) -> None:
        known = self._silos.get(silo.name)
        if known is not None and known.incarnation == silo.incarnation and known.state not in LIVING:
            del self._silos[silo.name]
            for lease in list(self.leases.values()):
                if lease.home == silo.name:
                    self.keep(lease._replace(home=""))

    async def forget(self, before_s: float) -> int:
        now = self.now(None)
        ended = [
            name
            for name, silo in self._silos.items()
            if silo.state not in LIVING and silo.heartbeat_at_us <= now - _us(before_s)
        ]
        for name in ended:
            del self._silos[name]
        return len(ended)


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _nobodys(lease: Lease) -> Lease:
    return lease._replace(owner="", incarnation=0)
