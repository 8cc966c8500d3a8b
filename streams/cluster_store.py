"""Silos and their leases in the control store. See `headrace.streams.cluster` for the records.

Who serves a queue is decided here and nowhere else: a lease is granted by one statement, under an epoch that grows by
one with each grant, and what is written under an older epoch is refused (`ControlStore.save_checkpoints`). Time is the
store's. A silo must count its leases from its own clock as it was before the call that got or renewed them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, and_, case, delete, func, or_, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from . import store_clock
from .cluster import LIVING, ClusterView, Lease, SiloRecord, SiloState, Superseded
from .database import Database
from .errors import DataDirectoryError, Fenced
from .schema import counters, entries, leases, silos, suspicions

_T = TypeVar("_T")
_P = ParamSpec("_P")

Clock = Callable[[Connection], int]
"""Microseconds. Called within a transaction."""

ENOUGH_VOTES = 2
"""So many peers must have failed to reach a silo before it is declared dead, or all others where there are fewer."""

_NO_HOMES: Mapping[tuple[str, int], str] = MappingProxyType({})
_AT_ONCE = 500  # rows in one statement, below every database's limit of parameters
_BOOT = "clock boot id"
_LIVING = [state.value for state in LIVING]


class ClusterStore:
    """Silos and leases of the cluster that shares a database.

    Every method is one transaction, and raises what `ControlStore`'s raise. `clock` takes the place of the store's own,
    for tests.
    """

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or store_clock.now_us
        self._same_boot = clock is not None

    async def join(self, name: str, address: str, serves: Sequence[str]) -> SiloRecord:
        """Become a member, under a new incarnation. An older one of the same name is superseded: it is refused from now
        on, and its leases run out."""
        return await self._write(_join, name, address, tuple(serves))

    async def beat(self, me: SiloRecord, lease_s: float) -> ClusterView:
        """Say that `me` lives, renew all its leases that are not over, and see the cluster as it is then.

        Raises Fenced where `me` was declared dead, has left or is superseded: nothing is renewed.
        """
        return await self._write(_beat, me, _us(lease_s))

    async def view(self) -> ClusterView:
        """The cluster as it is."""
        await self._on_this_boot()
        return await self._database.read(_view_now, self._clock)

    async def acquire(
        self,
        me: SiloRecord,
        wanted: Sequence[tuple[str, int]],
        lease_s: float,
        homes: Mapping[tuple[str, int], str] = _NO_HOMES,
    ) -> list[Lease]:
        """Take those of the wanted queues, given as (provider, queue), that nobody has or whose lease is over. Returns
        the leases granted; none while `me` is leaving. `homes` are kept with them.

        What `me` has already is granted anew, under a new epoch: so is one whose answer was lost. Raises Fenced as
        `beat` does.
        """
        return await self._write(_acquire, me, {queue: homes.get(queue, "") for queue in wanted}, _us(lease_s))

    async def settle(self, me: SiloRecord, homes: Mapping[tuple[str, int], str]) -> None:
        """Say who should have queues of which `me` has the leases, once everybody is there."""
        await self._write(_settle, me, dict(homes))

    async def release(self, me: SiloRecord, held: Sequence[Lease]) -> None:
        """Give up leases, so that others may have them at once; those that somebody else got meanwhile stay his."""
        await self._write(_release, me, sorted((lease.provider, lease.queue, lease.epoch) for lease in held))

    async def leaving(self, me: SiloRecord) -> None:
        """Give no new queue to this silo, which may be another one. Raises Fenced as `beat` does."""
        await self._write(_leaving, me)

    async def leave(self, me: SiloRecord) -> None:
        """Stop being a member, and release all leases. Nothing is left to do for one that is dead or superseded, except
        for its leases."""
        await self._write(_end, me, SiloState.LEFT)

    async def bury(self, silo: SiloRecord) -> None:
        """Declare a silo dead whose process is known to be gone, and release its leases at once. For who knows it from
        the kernel: a silo that merely does not answer may still serve its queues."""
        await self._write(_end, silo, SiloState.DEAD)

    async def suspect(self, me: SiloRecord, suspect: SiloRecord, dead_after_s: float) -> bool:
        """Vote that a silo cannot be reached; the vote counts for `dead_after_s`. Returns whether it was declared dead
        by it: its heartbeat is older than `dead_after_s`, and `ENOUGH_VOTES` living peers say so, or all others.

        Its leases are left to run out. Raises Fenced as `beat` does.
        """
        return await self._write(_suspect, me, suspect, _us(dead_after_s))

    async def forget(self, before_s: float) -> int:
        """Remove silos that have been dead or gone for so long. Returns how many."""
        return await self._write(_forget, _us(before_s))

    async def _write(
        self, work: Callable[Concatenate[Connection, Clock, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        await self._on_this_boot()
        return await self._database.write(work, self._clock, *args, **kwargs)

    async def _on_this_boot(self) -> None:
        if not self._same_boot:
            await self._database.write(_end_other_boots)
            self._same_boot = True


# What each method does within its transaction. Rows are locked silos first, then leases, each in the order of keys.


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _insert(connection: Connection, table: Any) -> sqlite.Insert | postgresql.Insert:
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def _end_other_boots(connection: Connection) -> None:
    """Where the machine was started since: no silo of before lives, and all times are those of another clock."""
    boot = store_clock.boot_id(connection)
    if not boot or connection.execute(select(entries.c.value).where(entries.c.key == _BOOT)).scalar() == boot:
        return
    keep = _insert(connection, entries).values(key=_BOOT, value=boot)
    connection.execute(keep.on_conflict_do_update(index_elements=["key"], set_={"value": boot}))
    now = store_clock.now_us(connection)
    connection.execute(update(silos).where(silos.c.state.in_(_LIVING)).values(state=SiloState.DEAD.value))
    connection.execute(update(silos).values(joined_at_us=now, heartbeat_at_us=now))
    connection.execute(update(leases).values(owner="", incarnation=0, expires_at_us=0))
    connection.execute(delete(suspicions))


def _join(connection: Connection, clock: Clock, name: str, address: str, serves: Sequence[str]) -> SiloRecord:
    count = update(counters).where(counters.c.name == "incarnation").values(value=counters.c.value + 1)
    incarnation: int = connection.execute(count.returning(counters.c.value)).scalar_one()
    now = clock(connection)
    row = {
        "incarnation": incarnation,
        "address": address,
        "serves": msgspec.json.encode(serves).decode(),
        "state": SiloState.ACTIVE.value,
        "joined_at_us": now,
        "heartbeat_at_us": now,
    }
    statement = _insert(connection, silos).values(name=name, **row)
    connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=row))
    connection.execute(delete(suspicions).where(suspicions.c.silo == name))
    return SiloRecord(name, incarnation, address, serves, SiloState.ACTIVE, now, now, ())


def _is(silo: SiloRecord) -> ColumnElement[bool]:
    return and_(silos.c.name == silo.name, silos.c.incarnation == silo.incarnation)


def _held_by(silo: SiloRecord) -> ColumnElement[bool]:
    return and_(leases.c.owner == silo.name, leases.c.incarnation == silo.incarnation)


def _beat(connection: Connection, clock: Clock, me: SiloRecord, lease_us: int) -> ClusterView:
    now = clock(connection)
    mine = update(silos).where(_is(me), silos.c.state.in_(_LIVING))
    if not connection.execute(mine.values(heartbeat_at_us=now)).rowcount:
        raise _fenced(connection, me)
    _change_leases(connection, and_(_held_by(me), leases.c.expires_at_us > now), expires_at_us=now + lease_us)
    return _view(connection, now)


def _change_leases(connection: Connection, which: ColumnElement[bool], **values: Any) -> None:
    """Change these leases, which are locked in order first: of two that wait for each other one would fail."""
    keys = select(leases.c.provider, leases.c.queue).where(which).order_by(leases.c.provider, leases.c.queue)
    chosen = tuple_(leases.c.provider, leases.c.queue).in_(keys.with_for_update())
    connection.execute(update(leases).where(which, chosen).values(**values))


def _fenced(connection: Connection, silo: SiloRecord) -> Fenced:
    who = f"silo {silo.name!r}, incarnation {silo.incarnation},"
    row = connection.execute(select(silos.c.incarnation, silos.c.state).where(silos.c.name == silo.name)).one_or_none()
    if row is None:
        return Fenced(f"{who} is no member of the cluster any more: join again")
    if row.incarnation != silo.incarnation:
        return Superseded(f"{who} is superseded by incarnation {row.incarnation}: another process uses its name")
    if row.state == SiloState.DEAD.value:
        return Fenced(f"{who} was declared dead by its peers: join again")
    return Fenced(f"{who} has left the cluster: join again")


def _view_now(connection: Connection, clock: Clock) -> ClusterView:
    return _view(connection, clock(connection))


def _view(connection: Connection, now: int) -> ClusterView:
    rows = connection.execute(select(leases).order_by(leases.c.provider, leases.c.queue)).all()
    return ClusterView(now, _silos(connection, now), [Lease._make(row) for row in rows])


def _silos(connection: Connection, now: int) -> list[SiloRecord]:
    votes = and_(suspicions.c.silo == silos.c.name, suspicions.c.incarnation == silos.c.incarnation)
    counted = and_(votes, suspicions.c.expires_at_us > now)
    query = select(silos, suspicions.c.voter).select_from(silos.outerjoin(suspicions, counted))
    rows: dict[str, Row[Any]] = {}
    voters: defaultdict[str, list[str]] = defaultdict(list)
    for row in connection.execute(query.order_by(silos.c.name, suspicions.c.voter)):
        rows[row.name] = row
        if row.voter is not None:
            voters[row.name].append(row.voter)
    return [_silo_of(row, voters[name]) for name, row in rows.items()]


def _silo_of(row: Row[Any], voters: Sequence[str]) -> SiloRecord:
    try:
        serves = msgspec.json.decode(row.serves, type=tuple[str, ...])
        state = SiloState(row.state)
    except (msgspec.MsgspecError, ValueError) as error:
        raise DataDirectoryError(
            f"silo {row.name!r} in the control store is damaged ({error}): restore it from a copy"
        ) from None
    return SiloRecord(
        row.name, row.incarnation, row.address, serves, state, row.joined_at_us, row.heartbeat_at_us, tuple(voters)
    )


def _require(connection: Connection, silo: SiloRecord) -> SiloState:
    """The state of a member, as it stays until this transaction ends. Raises Fenced."""
    query = select(silos.c.state).where(_is(silo), silos.c.state.in_(_LIVING)).with_for_update(read=True)
    state = connection.execute(query).scalar()
    if state is None:
        raise _fenced(connection, silo)
    return SiloState(state)


def _acquire(
    connection: Connection, clock: Clock, me: SiloRecord, wanted: Mapping[tuple[str, int], str], lease_us: int
) -> list[Lease]:
    """`wanted` has the home of each queue."""
    if _require(connection, me) is not SiloState.ACTIVE:
        return []
    now = clock(connection)
    granted = [_grant(connection, me, dict(chunk), now, now + lease_us) for chunk in _chunks(sorted(wanted.items()))]
    return sorted(lease for chunk in granted for lease in chunk)


def _grant(
    connection: Connection, me: SiloRecord, wanted: Mapping[tuple[str, int], str], now: int, expires: int
) -> list[Lease]:
    owned = {"owner": me.name, "incarnation": me.incarnation, "expires_at_us": expires}
    rows = [
        {"provider": provider, "queue": queue, "epoch": 1, "home": home, **owned}
        for (provider, queue), home in wanted.items()
    ]
    free = or_(leases.c.owner == "", leases.c.expires_at_us <= now, _held_by(me))
    statement = _insert(connection, leases).values(rows)
    changed = {**owned, "epoch": leases.c.epoch + 1, "home": statement.excluded.home}
    statement = statement.on_conflict_do_update(index_elements=["provider", "queue"], set_=changed, where=free)
    return [Lease(*row) for row in connection.execute(statement.returning(leases))]


def _chunks(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    return (items[at : at + _AT_ONCE] for at in range(0, len(items), _AT_ONCE))


_NOBODY: dict[str, Any] = {"owner": "", "incarnation": 0, "expires_at_us": 0}


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


def _suspect(connection: Connection, clock: Clock, me: SiloRecord, suspect: SiloRecord, dead_after_us: int) -> bool:
    both = or_(_is(me), _is(suspect))
    query = select(silos).where(both, silos.c.state.in_(_LIVING)).order_by(silos.c.name).with_for_update()
    rows = {(row.name, row.incarnation): row for row in connection.execute(query)}
    if (me.name, me.incarnation) not in rows:
        raise _fenced(connection, me)
    row = rows.get((suspect.name, suspect.incarnation))
    if row is None or me.name == suspect.name:
        return False
    now = clock(connection)
    _vote(connection, me, suspect, now + dead_after_us)
    if now - row.heartbeat_at_us <= dead_after_us or not _outvoted(connection, me, suspect, now, dead_after_us):
        return False
    connection.execute(update(silos).where(_is(suspect)).values(state=SiloState.DEAD.value))
    connection.execute(delete(suspicions).where(suspicions.c.silo == suspect.name))
    return True


def _vote(connection: Connection, me: SiloRecord, suspect: SiloRecord, expires: int) -> None:
    vote = {"incarnation": suspect.incarnation, "voter_incarnation": me.incarnation, "expires_at_us": expires}
    statement = _insert(connection, suspicions).values(silo=suspect.name, voter=me.name, **vote)
    connection.execute(statement.on_conflict_do_update(index_elements=["silo", "voter"], set_=vote))


def _outvoted(connection: Connection, me: SiloRecord, suspect: SiloRecord, now: int, dead_after_us: int) -> bool:
    """Whether enough of the other living silos have voted. The voter lives: it is asking."""
    lives = and_(silos.c.state.in_(_LIVING), silos.c.name != suspect.name)
    fresh = or_(silos.c.name == me.name, silos.c.heartbeat_at_us >= now - dead_after_us)
    cast = and_(
        suspicions.c.silo == suspect.name,
        suspicions.c.incarnation == suspect.incarnation,
        suspicions.c.voter == silos.c.name,
        suspicions.c.voter_incarnation == silos.c.incarnation,
        suspicions.c.expires_at_us > now,
    )
    votes = func.sum(case((suspicions.c.voter.is_not(None), 1), else_=0))
    query = select(func.count(), votes).select_from(silos.outerjoin(suspicions, cast)).where(lives, fresh)
    peers, against = connection.execute(query).one()
    return against >= min(ENOUGH_VOTES, peers)


def _forget(connection: Connection, clock: Clock, before_us: int) -> int:
    now = clock(connection)
    ended = and_(silos.c.state.not_in(_LIVING), silos.c.heartbeat_at_us <= now - before_us)
    connection.execute(delete(suspicions).where(suspicions.c.expires_at_us <= now))
    return connection.execute(delete(silos).where(ended)).rowcount
