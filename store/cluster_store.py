"""Silos and their leases in the control store. See `headrace.streams.cluster` for the records.

Only this module grants leases. One statement grants a lease, under an epoch that grows by one with each grant. Writes
under an older epoch are refused (`ControlStore.save_checkpoints`). The store's clock decides nothing here, because it
may be set. A silo times its own lease by its own clock, from before the call that got or renewed it. It takes a lease
of another silo only after it saw the lease unchanged for the lease's length. The store compares the lease once more, so
that a lease that was renewed meanwhile stays with its owner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, and_, case, delete, func, or_, select, tuple_, update

from ..streams.cluster import LIVING, ClusterView, Lease, SiloRecord, SiloState, SiloSuperseded
from ..streams.errors import DataDirectoryError, Fenced
from . import store_clock
from .database import Database
from .schema import counters, entries, leases, silos, suspicions
from .store_clock import BootId, Clock
from .store_part import insert_into

_T = TypeVar("_T")
_P = ParamSpec("_P")

ENOUGH_VOTES = 2
"""Number of silos that must fail to reach a silo before it is declared dead; if there are fewer others, all of them."""

_NO_HOMES: Mapping[tuple[str, int], str] = MappingProxyType({})
_AT_ONCE = 500  # rows in one statement, below every database's limit of parameters
_BOOT = "clock boot id"
_LIVING = [state.value for state in LIVING]


class ClusterStore:
    """Silos and leases of the cluster that shares a database.

    Every method is one transaction, and raises the errors of `ControlStore`. Tests pass a `clock` that replaces the
    store's own. `secret_hash` is the hash of the secret with which the joining silo calls other silos.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock | None = None,
        *,
        secret_hash: str = "",
        boot_id: BootId = store_clock.boot_id,
    ) -> None:
        self._boot_id = boot_id
        self._database = database
        self._secret_hash = secret_hash
        self._clock = clock or store_clock.now_us
        self._same_boot = clock is not None

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
        """Add a member, under a new incarnation. Clients reach it at `public_address`, or at `address` if that is
        empty. An older member of the same name is superseded: it is refused from now
        on, and its leases expire."""
        me = SiloRecord(
            name, 0, address, tuple(serves), SiloState.ACTIVE, 0, 0, self._secret_hash, 0, dict(settings), process,
            public_address,
        )  # fmt: skip
        return await self._write(_join, me)

    async def beat(self, me: SiloRecord, lease_s: float) -> ClusterView:
        """Store a heartbeat of `me`, renew all leases that it still has, and return the state of the cluster.

        Raises Fenced, and renews nothing, if `me` was declared dead, has left or is superseded.
        """
        return await self._write(_beat, me, _us(lease_s))

    async def view(self) -> ClusterView:
        """Return the state of the cluster."""
        await self._on_this_boot()
        return await self._database.read(_view_now, self._clock)

    async def acquire(
        self,
        me: SiloRecord,
        wanted: Sequence[tuple[str, int]],
        lease_s: float,
        homes: Mapping[tuple[str, int], str] = _NO_HOMES,
        over: Collection[Lease] = (),
    ) -> list[Lease]:
        """Take wanted queues, given as (provider, queue): those without an owner, and those whose lease is in `over`
        and unchanged. Return the granted leases; none while `me` is leaving. `homes` are stored with them.

        A lease that `me` has already is granted again under a new epoch: its answer may have been lost. Raises Fenced
        as `beat` does.
        """
        homed = {queue: homes.get(queue, "") for queue in wanted}
        ended = {(lease.provider, lease.queue): (lease.epoch, lease.renewals) for lease in over}
        return await self._write(_acquire, me, homed, ended, _us(lease_s))

    async def settle(self, me: SiloRecord, homes: Mapping[tuple[str, int], str]) -> None:
        """Store the homes of queues whose leases `me` has. The home of a queue is the silo that should have it when all
        silos are present."""
        await self._write(_settle, me, dict(homes))

    async def release(self, me: SiloRecord, held: Sequence[Lease]) -> None:
        """Give up leases, so that other silos can take them at once. A lease that another silo got meanwhile stays."""
        await self._write(_release, me, sorted((lease.provider, lease.queue, lease.epoch) for lease in held))

    async def leaving(self, me: SiloRecord) -> None:
        """Mark `me` as leaving, so that it gets no new queue. `me` may be another silo than the caller. Raises Fenced
        as `beat` does."""
        await self._write(_leaving, me)

    async def leave(self, me: SiloRecord) -> None:
        """End the membership of `me`, and release all its leases. For a dead or superseded silo, only release its
        leases."""
        await self._write(_end, me, SiloState.LEFT)

    async def declare_dead(self, silo: SiloRecord) -> None:
        """Declare a silo dead whose process has ended, and release its leases at once. The caller must know it from the
        kernel: a silo that only does not answer may still serve its queues."""
        await self._write(_end, silo, SiloState.DEAD)

    async def suspect(self, me: SiloRecord, suspect: SiloRecord, peers: Collection[str]) -> bool:
        """Vote that a silo, whose heartbeat did not change for too long, cannot be reached. The vote counts until its
        next heartbeat. Return whether the vote declared it dead: `ENOUGH_VOTES` silos voted, or all others.

        The others are `me` and the living silos of `peers`; the caller names the silos with a recent heartbeat. The
        leases of a dead silo expire by themselves. Raises Fenced as `beat` does.
        """
        return await self._write(_suspect, me, suspect, frozenset(peers))

    async def remove(self, silo: SiloRecord) -> None:
        """Remove a silo that is dead or has left, and its homes, so that no queue waits for it any more."""
        await self._write(_remove, silo)

    async def forget(self, before_s: float) -> int:
        """Remove silos that died or left at least `before_s` seconds ago. Return how many."""
        return await self._write(_forget, _us(before_s))

    async def _write(
        self, work: Callable[Concatenate[Connection, Clock, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        await self._on_this_boot()
        return await self._database.write(work, self._clock, *args, **kwargs)

    async def _on_this_boot(self) -> None:
        if not self._same_boot:
            await self._database.write(_end_other_boots, self._boot_id)
            self._same_boot = True


# The work of each method, within its transaction. Rows of silos are locked first, then rows of leases, each in the
# order of keys.


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _end_other_boots(connection: Connection, boot_id: BootId) -> None:
    """If the machine was restarted: declare all earlier silos dead, and replace all times: they are by a clock
    that has started again."""
    boot = boot_id(connection)
    if not boot or connection.execute(select(entries.c.value).where(entries.c.key == _BOOT)).scalar() == boot:
        return
    keep = insert_into(connection, entries).values(key=_BOOT, value=boot)
    connection.execute(keep.on_conflict_do_update(index_elements=["key"], set_={"value": boot}))
    now = store_clock.now_us(connection)
    connection.execute(update(silos).where(silos.c.state.in_(_LIVING)).values(state=SiloState.DEAD.value))
    connection.execute(update(silos).values(joined_at_us=now, heartbeat_at_us=now))
    connection.execute(update(leases).values(**_NOBODY))
    connection.execute(delete(suspicions))


def _join(connection: Connection, clock: Clock, silo: SiloRecord) -> SiloRecord:
    count = update(counters).where(counters.c.name == "incarnation").values(value=counters.c.value + 1)
    incarnation: int = connection.execute(count.returning(counters.c.value)).scalar_one()
    now = clock(connection)
    row = {
        "incarnation": incarnation,
        "address": silo.address,
        "serves": msgspec.json.encode(silo.serves).decode(),
        "state": silo.state.value,
        "joined_at_us": now,
        "heartbeat_at_us": now,
        "secret_hash": silo.secret_hash,
        "heartbeats": 0,
        "settings": msgspec.json.encode(silo.settings).decode(),
        "process": silo.process,
        "public_address": silo.public_address,
    }
    statement = insert_into(connection, silos).values(name=silo.name, **row)
    connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=row))
    connection.execute(delete(suspicions).where(suspicions.c.silo == silo.name))
    return silo._replace(incarnation=incarnation, joined_at_us=now, heartbeat_at_us=now)


def _is(silo: SiloRecord) -> ColumnElement[bool]:
    return and_(silos.c.name == silo.name, silos.c.incarnation == silo.incarnation)


def _held_by(silo: SiloRecord) -> ColumnElement[bool]:
    return and_(leases.c.owner == silo.name, leases.c.incarnation == silo.incarnation)


def _beat(connection: Connection, clock: Clock, me: SiloRecord, lease_us: int) -> ClusterView:
    now = clock(connection)
    mine = update(silos).where(_is(me), silos.c.state.in_(_LIVING))
    if not connection.execute(mine.values(heartbeat_at_us=now, heartbeats=silos.c.heartbeats + 1)).rowcount:
        raise _fenced(connection, me)
    _change_leases(connection, _held_by(me), renewals=leases.c.renewals + 1, length_us=lease_us)
    return _view(connection, now)


def _change_leases(connection: Connection, chosen: ColumnElement[bool], **values: Any) -> None:
    """Change these leases. They are locked in order first: else two transactions could wait for each other."""
    keys = select(leases.c.provider, leases.c.queue).where(chosen).order_by(leases.c.provider, leases.c.queue)
    locked = tuple_(leases.c.provider, leases.c.queue).in_(keys.with_for_update())
    connection.execute(update(leases).where(chosen, locked).values(**values))


def _fenced(connection: Connection, silo: SiloRecord) -> Fenced:
    shown = f"silo {silo.name!r}, incarnation {silo.incarnation},"
    row = connection.execute(select(silos.c.incarnation, silos.c.state).where(silos.c.name == silo.name)).one_or_none()
    if row is None:
        return Fenced(f"{shown} is no member of the cluster any more: join again")
    if row.incarnation != silo.incarnation:
        return SiloSuperseded(f"{shown} is superseded by incarnation {row.incarnation}: another process uses its name")
    if row.state == SiloState.DEAD.value:
        return Fenced(f"{shown} was declared dead by its peers: join again")
    return Fenced(f"{shown} has left the cluster: join again")


def _view_now(connection: Connection, clock: Clock) -> ClusterView:
    return _view(connection, clock(connection))


def _view(connection: Connection, now: int) -> ClusterView:
    rows = connection.execute(select(leases).order_by(leases.c.provider, leases.c.queue)).all()
    members = connection.execute(select(silos).order_by(silos.c.name))
    return ClusterView(now, [_silo_of(row) for row in members], [Lease._make(row) for row in rows])


def _silo_of(row: Row[Any]) -> SiloRecord:
    try:
        serves = msgspec.json.decode(row.serves, type=tuple[str, ...])
        state = SiloState(row.state)
        settings = msgspec.json.decode(row.settings, type=dict[str, str])
    except (msgspec.MsgspecError, ValueError) as error:
        raise DataDirectoryError(
            f"silo {row.name!r} in the control store is damaged ({error}): restore it from a copy"
        ) from None
    times = row.joined_at_us, row.heartbeat_at_us
    known = row.secret_hash, row.heartbeats, settings, row.process, row.public_address
    return SiloRecord(row.name, row.incarnation, row.address, serves, state, *times, *known)


def _require(connection: Connection, silo: SiloRecord) -> SiloState:
    """Return the state of a member, and lock it until this transaction ends. Raises Fenced if it is no member."""
    query = select(silos.c.state).where(_is(silo), silos.c.state.in_(_LIVING)).with_for_update(read=True)
    state = connection.execute(query).scalar()
    if state is None:
        raise _fenced(connection, silo)
    return SiloState(state)


def _acquire(
    connection: Connection,
    _clock: Clock,
    me: SiloRecord,
    wanted: Mapping[tuple[str, int], str],
    expired: Mapping[tuple[str, int], tuple[int, int]],
    lease_us: int,
) -> list[Lease]:
    """Do the work of `acquire`: `wanted` maps queues to their homes, `expired` maps expired leases of other silos to
    epoch and renewals."""
    if _require(connection, me) is not SiloState.ACTIVE:
        return []
    granted = [_grant(connection, me, dict(chunk), expired, lease_us) for chunk in _chunks(sorted(wanted.items()))]
    return sorted(lease for chunk in granted for lease in chunk)


def _grant(
    connection: Connection,
    me: SiloRecord,
    wanted: Mapping[tuple[str, int], str],
    expired: Mapping[tuple[str, int], tuple[int, int]],
    lease_us: int,
) -> list[Lease]:
    owned = {"owner": me.name, "incarnation": me.incarnation, "length_us": lease_us}
    rows = [
        {"provider": provider, "queue": queue, "epoch": 1, "renewals": 1, "home": home, **owned}
        for (provider, queue), home in wanted.items()
    ]
    stood = [(*queue, *expired[queue]) for queue in wanted if queue in expired]
    unchanged = tuple_(leases.c.provider, leases.c.queue, leases.c.epoch, leases.c.renewals).in_(stood)
    free = or_(leases.c.owner == "", _held_by(me), *([unchanged] if stood else []))
    statement = insert_into(connection, leases).values(rows)
    changed = {
        **owned,
        "epoch": leases.c.epoch + 1,
        "renewals": leases.c.renewals + 1,
        "home": statement.excluded.home,
    }
    statement = statement.on_conflict_do_update(index_elements=["provider", "queue"], set_=changed, where=free)
    return [Lease(*row) for row in connection.execute(statement.returning(leases))]


def _chunks(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    return (items[at : at + _AT_ONCE] for at in range(0, len(items), _AT_ONCE))


_NOBODY: dict[str, Any] = {"owner": "", "incarnation": 0}


def _release(connection: Connection, _clock: Clock, me: SiloRecord, held: Sequence[tuple[str, int, int]]) -> None:
    for chunk in _chunks(held):
        same = tuple_(leases.c.provider, leases.c.queue, leases.c.epoch).in_(chunk)
        _change_leases(connection, and_(_held_by(me), same), **_NOBODY)


def _settle(connection: Connection, _clock: Clock, me: SiloRecord, homes: Mapping[tuple[str, int], str]) -> None:
    by_home: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for queue in sorted(homes):
        by_home[homes[queue]].append(queue)
    for home, queues in sorted(by_home.items()):
        for chunk in _chunks(queues):
            these = tuple_(leases.c.provider, leases.c.queue).in_(chunk)
            _change_leases(connection, and_(_held_by(me), these), home=home)


def _leaving(connection: Connection, _clock: Clock, silo: SiloRecord) -> None:
    change = update(silos).where(_is(silo), silos.c.state.in_(_LIVING)).values(state=SiloState.LEAVING.value)
    if not connection.execute(change).rowcount:
        raise _fenced(connection, silo)


def _end(connection: Connection, _clock: Clock, silo: SiloRecord, state: SiloState) -> None:
    change = update(silos).where(_is(silo), silos.c.state.in_(_LIVING)).values(state=state.value)
    if connection.execute(change).rowcount:
        connection.execute(delete(suspicions).where(suspicions.c.silo == silo.name))
    _change_leases(connection, _held_by(silo), **_NOBODY)


def _suspect(
    connection: Connection, _clock: Clock, me: SiloRecord, suspect: SiloRecord, others: frozenset[str]
) -> bool:
    both = or_(_is(me), _is(suspect))
    query = select(silos).where(both, silos.c.state.in_(_LIVING)).order_by(silos.c.name).with_for_update()
    rows = {(row.name, row.incarnation): row for row in connection.execute(query)}
    if (me.name, me.incarnation) not in rows:
        raise _fenced(connection, me)
    row = rows.get((suspect.name, suspect.incarnation))
    if row is None or me.name == suspect.name or row.heartbeats != suspect.heartbeats:
        return False
    _vote(connection, me, suspect)
    if not _outvoted(connection, me, suspect, others):
        return False
    connection.execute(update(silos).where(_is(suspect)).values(state=SiloState.DEAD.value))
    connection.execute(delete(suspicions).where(suspicions.c.silo == suspect.name))
    return True


def _vote(connection: Connection, me: SiloRecord, suspect: SiloRecord) -> None:
    vote = {
        "incarnation": suspect.incarnation,
        "voter_incarnation": me.incarnation,
        "heartbeats": suspect.heartbeats,
    }
    statement = insert_into(connection, suspicions).values(silo=suspect.name, voter=me.name, **vote)
    connection.execute(statement.on_conflict_do_update(index_elements=["silo", "voter"], set_=vote))


def _outvoted(connection: Connection, me: SiloRecord, suspect: SiloRecord, others: frozenset[str]) -> bool:
    """Return whether enough of the other living silos have voted. `me`, the caller, counts as living."""
    lives = and_(silos.c.state.in_(_LIVING), silos.c.name != suspect.name)
    fresh = silos.c.name.in_(sorted(others | {me.name}))
    cast = and_(
        suspicions.c.silo == suspect.name,
        suspicions.c.incarnation == suspect.incarnation,
        suspicions.c.voter == silos.c.name,
        suspicions.c.voter_incarnation == silos.c.incarnation,
        suspicions.c.heartbeats == suspect.heartbeats,
    )
    votes = func.sum(case((suspicions.c.voter.is_not(None), 1), else_=0))
    query = select(func.count(), votes).select_from(silos.outerjoin(suspicions, cast)).where(lives, fresh)
    peers, against = connection.execute(query).one()
    return against >= min(ENOUGH_VOTES, peers)


def _remove(connection: Connection, _clock: Clock, silo: SiloRecord) -> None:
    ended = and_(_is(silo), silos.c.state.not_in(_LIVING))
    if connection.execute(delete(silos).where(ended)).rowcount:
        _change_leases(connection, leases.c.home == silo.name, home="")


def _forget(connection: Connection, clock: Clock, before_us: int) -> int:
    now = clock(connection)
    ended = and_(silos.c.state.not_in(_LIVING), silos.c.heartbeat_at_us <= now - before_us)
    return connection.execute(delete(silos).where(ended)).rowcount
