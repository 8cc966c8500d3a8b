"""The control store: what a provider must remember besides its events.

Subscriptions with their checkpoints, dead letters, gaps, the hashes of access tokens, and what was fixed when a
provider was made. Progress is fenced: `attach` hands out a new epoch, and whatever comes under an older one is refused,
so at most one agent moves a subscription on. In a cluster, where several silos share that epoch, the lease of the queue
fences as well (`headrace.streams.cluster_store`). Importing this module imports SQLAlchemy; import it where a store is
opened.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Table, and_, delete, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from . import schema
from .cluster_store import Clock, ClusterStore
from .database import Database
from .errors import DataDirectoryError, DefinitionConflict, Fenced, InvalidArgument, NotFound
from .parking import ParkingStore
from .rows import (
    checkpoint_of,
    checkpoint_row,
    dead_letter_of,
    dead_letter_row,
    definition_of,
    definition_text,
    differences,
    gap_of,
    gap_row,
    plain,
    printable,
)
from .schema import checkpoints, counters, dead_letters, entries, gaps, leases, providers, subscriptions, tokens
from .subscriptions import Checkpoint, DeadLetter, GapRecord, SubscriptionDefinition

_log = logging.getLogger(__name__)

_IDS_AT_ONCE = 500  # below every database's limit of parameters


class ProviderRecord(NamedTuple):
    """What was fixed when a provider was made."""

    name: str
    adapter: str
    queues: int
    mapper: str


class Attachment(NamedTuple):
    """The right to move a subscription on, until somebody attaches after us, and where it stands per queue."""

    epoch: int
    checkpoints: Mapping[int, Checkpoint]


class Refused(NamedTuple):
    """What `save_checkpoints` did not write. False where it wrote everything."""

    subscriptions: Sequence[str] = ()
    """Those whose epoch is no longer the subscription's, or that are gone."""
    queues: frozenset[int] = frozenset()
    """Those whose lease somebody else has by now, or nobody."""

    def __bool__(self) -> bool:
        return bool(self.subscriptions or self.queues)


class Orders(NamedTuple):
    """What was asked of whoever serves subscriptions and queues, by whom else has this store."""

    epochs: Mapping[str, int]
    """Of subscriptions, by name. A higher one than at `attach`: it was moved. One that is missing was deleted."""
    stopped: frozenset[int]
    """Queues that nobody is to read."""


class TokenRecord(NamedTuple):
    """An access token as it is kept: who has it and what it allows, not the token itself.

    `hash` is its plain SHA-256. A slow hash, as for passwords, would gain nothing: a token is 256 random bits, which
    nobody finds by trying, however fast.
    """

    name: str
    hash: bytes
    permissions: Mapping[str, Sequence[str]]
    """Patterns of namespaces by permission, such as {"publish": ["orders*"]}."""
    created_at_us: int


class ControlStore:
    """One provider directory's control data, or a cluster's. Several processes may have it open at once.

    Every method is one transaction: durable when it returns, without effect when it raises. A cancelled call happens
    wholly or not at all. Mappings are copied before anything waits.

    Every method raises StorageError (retryable) where the database is locked or fails, StorageFull (retryable) where
    there is no space, DataDirectoryError where it is damaged, Closed after `aclose`; InvalidArgument for a position
    that 64 bits do not hold.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    async def open(cls, where: str | Path, *, timeout_s: float | None = None) -> ControlStore:
        """Open, and create where there is none: the path of a file in an existing directory, a database URL, or
        "memory" for a private one that is gone on `aclose`.

        After `timeout_s` a call fails that waits for another process or for a server; the default is 30 seconds for a
        file, 5 for a server. Raises DataDirectoryError for a file that another program or a newer headrace made,
        InvalidArgument for a URL of no database that is supported.
        """
        return cls(await Database.open(where, schema.migrate, timeout_s=timeout_s))

    @property
    def private(self) -> bool:
        """Nobody else has it, and it is gone on `aclose`."""
        return self._database.private

    async def aclose(self) -> None:
        """Finish the calls that were made, then close. Idempotent."""
        await self._database.aclose()

    def cluster(self, clock: Clock | None = None) -> ClusterStore:
        """The silos and leases kept in the same database. Close this store, not that one."""
        return ClusterStore(self._database, clock)

    def parking(self, clock: Clock | None = None) -> ParkingStore:
        """The batches that wait until they are due, kept in the same database. Close this store, not that one."""
        return ParkingStore(self._database, clock)

    # Providers

    async def register_provider(self, name: str, *, adapter: str, queues: int, mapper: str) -> None:
        """Remember a provider the first time. Raises InvalidArgument where it was made otherwise."""
        await self._database.write(_register_provider, ProviderRecord(name, adapter, queues, mapper))

    async def providers(self) -> list[ProviderRecord]:
        """All providers, by name."""
        return await self._database.read(_providers)

    # Subscriptions

    async def create_subscription(
        self, provider: str, definition: SubscriptionDefinition, start: Mapping[int, Checkpoint]
    ) -> bool:
        """Store a definition and where it starts in each queue. False where an equal one exists, which stays as it is.

        Raises DefinitionConflict, naming the fields that differ, where the name exists with another definition.
        """
        return await self._database.write(_create_subscription, provider, definition, plain(start))

    async def subscription(self, provider: str, name: str) -> SubscriptionDefinition:
        """Raises NotFound."""
        return await self._database.read(_subscription, provider, name)

    async def subscriptions(self, provider: str) -> list[SubscriptionDefinition]:
        """All subscriptions of a provider, by name."""
        return await self._database.read(_subscriptions, provider)

    async def delete_subscription(self, provider: str, name: str) -> None:
        """Delete a subscription, its checkpoints and its gap records; whoever is attached is fenced.

        Its dead letters stay until they are deleted themselves: they may be the last copy of their events. Raises
        NotFound.
        """
        await self._database.write(_delete_subscription, provider, name)

    # Progress

    async def attach(self, provider: str, name: str, *, exclusive: bool = True) -> Attachment:
        """Take over a subscription: the new epoch is higher than every one before. Where it is not `exclusive`, share
        the epoch it has with whoever is attached: leases of queues must say who writes what. Raises NotFound."""
        if exclusive:
            return await self._database.write(_attach, provider, name)
        return await self._database.read(_attach_too, provider, name)

    async def save_checkpoints(
        self,
        provider: str,
        progress: Sequence[tuple[str, int, Mapping[int, Checkpoint]]],
        leases: Mapping[int, int] | None = None,
    ) -> Refused:
        """Store the progress of several subscriptions, given as (name, epoch, checkpoint per queue).

        Returns the subscriptions whose epoch is past: nothing was written for those; and, with `leases` (epoch of the
        lease by queue), the queues whose lease was granted again or released since, or that have none there: nothing
        was written for those either. A lease that is over but was not granted again still counts. Everything else was
        written. Under one epoch a queue's `next_offset` never moves backwards: such a checkpoint is late and ignored.
        """
        copies = [(name, epoch, plain(positions)) for name, epoch, positions in progress]
        held = None if leases is None else dict(leases)
        return await self._database.write(_save_checkpoints, provider, copies, held)

    async def checkpoints(self, provider: str, name: str) -> Mapping[int, Checkpoint]:
        """Where a subscription stands, per queue. Raises NotFound."""
        return await self._database.read(_checkpoints_or_not_found, provider, name)

    async def checkpoints_of_queue(self, provider: str, queue: int) -> dict[str, Checkpoint]:
        """Where all subscriptions stand in a queue, by name; those that do not read it are missing."""
        return await self._database.read(_checkpoints_of_queue, provider, queue)

    async def seek(self, provider: str, name: str, positions: Mapping[int, Checkpoint], reason: str) -> int:
        """Move a subscription in the given queues, in any direction. Returns the new epoch: whoever is attached is
        fenced. Raises NotFound.
        """
        epoch = await self._database.write(_seek, provider, name, plain(positions))
        offsets = {queue: position.next_offset for queue, position in sorted(positions.items())}
        _log.info("subscription %s of %s moved to %s (epoch %d): %s", name, provider, offsets, epoch, reason)
        return epoch

    async def watermarks(self, provider: str, *, apart_from: Sequence[str] = ()) -> dict[int, int]:
        """The lowest offset still needed by any subscription, per queue; a queue that none reads is missing.

        Subscriptions named in `apart_from` do not count.
        """
        return await self._database.read(_watermarks, provider, list(apart_from))

    async def orders(self, provider: str, names: Sequence[str]) -> Orders:
        """What is to be done about subscriptions by these names, and about queues."""
        return await self._database.read(_orders, provider, list(names))

    async def stop_queues(self, provider: str, queues: Sequence[int]) -> None:
        """Note that nobody is to read these queues until `start_queues`."""
        await self._database.write(_set_stopped, provider, list(queues), True)

    async def start_queues(self, provider: str, queues: Sequence[int]) -> None:
        """Note that these queues may be read again."""
        await self._database.write(_set_stopped, provider, list(queues), False)

    # Dead letters and gaps

    async def add_dead_letters(
        self, letters: Sequence[DeadLetter], epoch: int | None, leases: Mapping[int, int] | None = None
    ) -> list[int]:
        """Store events given up on; returns their ids, in order.

        The same event of the same subscription again updates reason, attempts and time instead of doubling. With an
        `epoch`, all letters are of one subscription; raises Fenced where it is no longer the subscription's. With
        `leases`, raises Fenced where one of the queues would be refused by `save_checkpoints`.
        """
        held = None if leases is None else dict(leases)
        return await self._database.write(_add_dead_letters, list(letters), epoch, held)

    async def dead_letters(
        self, provider: str, subscription: str | None = None, *, limit: int = 100, after_id: int = 0
    ) -> list[DeadLetter]:
        """The first `limit` dead letters with an id above `after_id`, by id: go on from the last one's."""
        return await self._database.read(_dead_letters, provider, subscription, limit, after_id)

    async def dead_letter(self, letter_id: int) -> DeadLetter:
        """Raises NotFound."""
        return await self._database.read(_dead_letter, letter_id)

    async def request_redrive(self, provider: str, subscription: str, ids: Sequence[int] | None = None) -> int:
        """Ask for dead letters to be delivered once more; None asks for all. Returns how many there are of those.

        Raises NotFound where the subscription is gone: nobody would deliver them.
        """
        return await self._database.write(_request_redrive, provider, subscription, ids)

    async def redrives(
        self, provider: str, names: Sequence[str], *, queues: Collection[int] | None = None, limit: int = 100
    ) -> list[DeadLetter]:
        """The first `limit` dead letters of these subscriptions whose redrive was asked for, by id; with `queues`, only
        letters of those queues."""
        of = None if queues is None else sorted(queues)
        return await self._database.read(_redrives, provider, list(names), of, limit)

    async def finish_redrive(self, letter_id: int, *, delivered: bool, reason: str | None, attempts: int) -> None:
        """Note how a redrive ended: a delivered letter is deleted; another stays, with the new `attempts` and, where
        given, `reason`. One that is gone meanwhile is no error.
        """
        await self._database.write(_finish_redrive, letter_id, delivered, reason, attempts)

    async def delete_dead_letters(self, provider: str, subscription: str, ids: Sequence[int] | None = None) -> int:
        """Delete dead letters of a subscription, which may be gone itself; None deletes all. Returns how many."""
        return await self._database.write(_delete_dead_letters, provider, subscription, ids)

    async def add_gaps(self, records: Sequence[GapRecord], leases: Mapping[int, int] | None = None) -> None:
        """Store gap records. The same range of the same subscription is stored once. With `leases`, raises Fenced where
        one of the queues would be refused by `save_checkpoints`: nothing is stored."""
        await self._database.write(_add_gaps, list(records), None if leases is None else dict(leases))

    async def left_behind(self, provider: str, subscription: str) -> tuple[int, int]:
        """How many dead letters and how many gap records a subscription has."""
        return await self._database.read(_left_behind, provider, subscription)

    async def gaps(self, provider: str, subscription: str | None = None) -> list[GapRecord]:
        """Gap records in the order in which they were stored."""
        return await self._database.read(_gaps, provider, subscription)

    # Access tokens

    async def add_token(self, token: TokenRecord) -> None:
        """Keep a token. Raises DefinitionConflict where one of its name exists: that one stays as it is."""
        await self._database.write(_add_token, token)

    async def tokens(self) -> list[TokenRecord]:
        """All tokens, by name."""
        return await self._database.read(_tokens)

    async def delete_token(self, name: str) -> None:
        """Forget a token, so that it allows nothing any more. Raises NotFound."""
        await self._database.write(_delete_token, name)

    # Entries

    async def value(self, key: str) -> str | None:
        """A small text kept under a key, None where there is none."""
        return await self._database.read(_value, key)

    async def set_value(self, key: str, value: str | None) -> None:
        """Keep a small text under a key; None deletes it."""
        await self._database.write(_set_value, key, value)

    async def value_or(self, key: str, value: str) -> str:
        """The text kept under a key; where there is none, keep `value`."""
        return await self._database.write(_value_or, key, value)


# What each method does within its transaction.


def _insert(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that knows ON CONFLICT, which both databases spell the same."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def _register_provider(connection: Connection, wanted: ProviderRecord) -> None:
    if wanted.queues < 1:
        raise InvalidArgument(f"provider {wanted.name!r} needs at least 1 queue, not {wanted.queues}")
    connection.execute(_insert(connection, providers).values(wanted._asdict()).on_conflict_do_nothing())
    row = connection.execute(select(providers).where(providers.c.name == wanted.name)).one()
    stored = ProviderRecord(row.name, row.adapter, row.queues, row.mapper)
    if stored != wanted:
        raise InvalidArgument(_other_provider(stored, wanted))


def _other_provider(stored: ProviderRecord, wanted: ProviderRecord) -> str:
    name = f"provider {stored.name!r}"
    if stored.queues != wanted.queues:
        return (
            f"{name} has {stored.queues} queues, not {wanted.queues}: the number is fixed at creation because streams "
            f"are mapped to queues; open it with {stored.queues}, or create another provider"
        )
    if stored.adapter != wanted.adapter:
        return (
            f"{name} keeps its events with the adapter {stored.adapter!r}, not {wanted.adapter!r}: open it with "
            f"{stored.adapter!r}, or create another provider"
        )
    return (
        f"{name} maps streams with {stored.mapper!r}, not {wanted.mapper!r}: another mapper would look for streams in "
        f"other queues; open it with {stored.mapper!r}, or create another provider"
    )


def _providers(connection: Connection) -> list[ProviderRecord]:
    rows = connection.execute(select(providers).order_by(providers.c.name))
    return [ProviderRecord(row.name, row.adapter, row.queues, row.mapper) for row in rows]


def _is(provider: str, name: str) -> ColumnElement[bool]:
    return and_(subscriptions.c.provider == provider, subscriptions.c.name == name)


def _of(table: Table, provider: str, name: str | None) -> ColumnElement[bool]:
    """Rows of one subscription, or of all of a provider."""
    return and_(table.c.provider == provider, *([] if name is None else [table.c.subscription == name]))


def _not_found(provider: str, name: str) -> NotFound:
    return NotFound(f"provider {provider!r} has no subscription {name!r}")


def _create_subscription(
    connection: Connection, provider: str, definition: SubscriptionDefinition, start: Mapping[int, Checkpoint]
) -> bool:
    row = {"provider": provider, "name": definition.name, "definition": definition_text(definition), "epoch": 0}
    statement = _insert(connection, subscriptions).values(row).on_conflict_do_nothing()
    while connection.execute(statement.returning(subscriptions.c.name)).first() is None:
        text = connection.execute(select(subscriptions.c.definition).where(_is(provider, definition.name))).scalar()
        if text is not None:  # else it was deleted in between
            _require_equal(definition_of(text), definition)
            return False
    _write_checkpoints(connection, _checkpoint_rows(provider, definition.name, 0, start))
    return True


def _require_equal(stored: SubscriptionDefinition, wanted: SubscriptionDefinition) -> None:
    if stored != wanted:
        raise DefinitionConflict(
            f"subscription {stored.name!r} exists with another definition: {differences(stored, wanted)}; use another "
            "name, or delete it first"
        )


def _subscription(connection: Connection, provider: str, name: str) -> SubscriptionDefinition:
    text = connection.execute(select(subscriptions.c.definition).where(_is(provider, name))).scalar()
    if text is None:
        raise _not_found(provider, name)
    return definition_of(text)


def _subscriptions(connection: Connection, provider: str) -> list[SubscriptionDefinition]:
    query = select(subscriptions.c.definition).where(subscriptions.c.provider == provider)
    return [definition_of(text) for text in connection.execute(query.order_by(subscriptions.c.name)).scalars()]


def _delete_subscription(connection: Connection, provider: str, name: str) -> None:
    if not connection.execute(delete(subscriptions).where(_is(provider, name))).rowcount:
        raise _not_found(provider, name)
    connection.execute(delete(checkpoints).where(_of(checkpoints, provider, name)))
    connection.execute(delete(gaps).where(_of(gaps, provider, name)))


def _attach(connection: Connection, provider: str, name: str) -> Attachment:
    return Attachment(_new_epoch(connection, provider, name), _checkpoints(connection, provider, name))


def _attach_too(connection: Connection, provider: str, name: str) -> Attachment:
    epoch = connection.execute(select(subscriptions.c.epoch).where(_is(provider, name))).scalar()
    if epoch is None:
        raise _not_found(provider, name)
    return Attachment(epoch, _checkpoints(connection, provider, name))


def _new_epoch(connection: Connection, provider: str, name: str) -> int:
    count = update(counters).where(counters.c.name == "epoch").values(value=counters.c.value + 1)
    epoch: int = connection.execute(count.returning(counters.c.value)).scalar_one()
    if not connection.execute(update(subscriptions).where(_is(provider, name)).values(epoch=epoch)).rowcount:
        raise _not_found(provider, name)
    return epoch


def _epochs(connection: Connection, provider: str, names: Sequence[str]) -> dict[str, int]:
    """The epochs as they stay until this transaction ends."""
    query = select(subscriptions.c.name, subscriptions.c.epoch).where(
        subscriptions.c.provider == provider, subscriptions.c.name.in_(names)
    )
    rows = connection.execute(query.order_by(subscriptions.c.name).with_for_update(read=True))
    return {row.name: row.epoch for row in rows}


def _refused(
    connection: Connection, provider: str, queues: Collection[int], held: Mapping[int, int] | None
) -> frozenset[int]:
    """The queues whose lease is no longer the one held; the others keep theirs until this transaction ends."""
    if held is None or not queues:
        return frozenset()
    query = select(leases.c.queue, leases.c.epoch).where(
        leases.c.provider == provider, leases.c.queue.in_(sorted(queues)), leases.c.owner != ""
    )
    rows = connection.execute(query.order_by(leases.c.queue).with_for_update(read=True))
    epochs = {row.queue: row.epoch for row in rows}
    return frozenset(queue for queue in queues if queue not in held or epochs.get(queue) != held[queue])


def _require_leases(
    connection: Connection, of: Iterable[DeadLetter] | Iterable[GapRecord], held: Mapping[int, int] | None
) -> None:
    queues: defaultdict[str, set[int]] = defaultdict(set)
    for record in of:
        queues[record.provider].add(record.queue)
    for provider in sorted(queues):
        if refused := _refused(connection, provider, queues[provider], held):
            raise Fenced(f"the lease of {provider!r} on queues {sorted(refused)} is lost: another silo may have them")


def _save_checkpoints(
    connection: Connection,
    provider: str,
    progress: Sequence[tuple[str, int, Mapping[int, Checkpoint]]],
    held: Mapping[int, int] | None,
) -> Refused:
    epochs = _epochs(connection, provider, [name for name, _, _ in progress])
    stale = [name for name, epoch, _ in progress if epochs.get(name) != epoch]
    current = [(name, epoch, positions) for name, epoch, positions in progress if epochs.get(name) == epoch]
    refused = _refused(connection, provider, {queue for _, _, each in progress for queue in each}, held)
    rows = [row for one in current for row in _checkpoint_rows(provider, *one) if row["queue"] not in refused]
    _write_checkpoints(connection, rows)
    return Refused(stale, refused)


def _checkpoint_rows(provider: str, name: str, epoch: int, positions: Mapping[int, Checkpoint]) -> list[dict[str, Any]]:
    keys = {"provider": provider, "subscription": name, "epoch": epoch}
    return [keys | checkpoint_row(queue, position) for queue, position in positions.items()]


def _write_checkpoints(connection: Connection, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    rows = sorted(rows, key=lambda row: (row["subscription"], row["queue"]))  # the order in which all lock them
    statement = _insert(connection, checkpoints)
    new = statement.excluded
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["provider", "subscription", "queue"],
            set_={column: new[column] for column in ("next_offset", "watermark", "behind", "epoch")},
            where=or_(new["epoch"] > checkpoints.c.epoch, new["next_offset"] >= checkpoints.c.next_offset),
        ),
        rows,
    )


def _checkpoints(connection: Connection, provider: str, name: str) -> dict[int, Checkpoint]:
    query = select(checkpoints).where(_of(checkpoints, provider, name)).order_by(checkpoints.c.queue)
    return {row.queue: checkpoint_of(row) for row in connection.execute(query)}


def _checkpoints_or_not_found(connection: Connection, provider: str, name: str) -> dict[int, Checkpoint]:
    _require_subscription(connection, provider, name)
    return _checkpoints(connection, provider, name)


def _checkpoints_of_queue(connection: Connection, provider: str, queue: int) -> dict[str, Checkpoint]:
    query = select(checkpoints).where(checkpoints.c.provider == provider, checkpoints.c.queue == queue)
    return {row.subscription: checkpoint_of(row) for row in connection.execute(query)}


def _require_subscription(connection: Connection, provider: str, name: str) -> None:
    if connection.execute(select(subscriptions.c.epoch).where(_is(provider, name))).scalar() is None:
        raise _not_found(provider, name)


def _seek(connection: Connection, provider: str, name: str, positions: Mapping[int, Checkpoint]) -> int:
    epoch = _new_epoch(connection, provider, name)
    _write_checkpoints(connection, _checkpoint_rows(provider, name, epoch, positions))
    return epoch


def _watermarks(connection: Connection, provider: str, apart_from: list[str]) -> dict[int, int]:
    lowest = select(checkpoints.c.queue, func.min(checkpoints.c.watermark).label("lowest"))
    counted = and_(checkpoints.c.provider == provider, checkpoints.c.subscription.not_in(apart_from))
    rows = connection.execute(lowest.where(counted).group_by(checkpoints.c.queue))
    return {row.queue: row.lowest for row in rows}


def _add_dead_letters(
    connection: Connection, letters: Sequence[DeadLetter], epoch: int | None, held: Mapping[int, int] | None
) -> list[int]:
    if epoch is not None and letters:
        _require_epoch(connection, {(letter.provider, letter.subscription) for letter in letters}, epoch)
    _require_leases(connection, letters, held)
    statement = _insert(connection, dead_letters)
    statement = statement.on_conflict_do_update(
        index_elements=["provider", "subscription", "queue", "token_offset", "token_index"],
        set_={column: statement.excluded[column] for column in ("reason", "attempts", "failed_at_us")},
    ).returning(dead_letters.c.id)
    return [connection.execute(statement, dead_letter_row(letter)).scalar_one() for letter in letters]


def _require_epoch(connection: Connection, of: set[tuple[str, str]], epoch: int) -> None:
    if len(of) > 1:
        raise InvalidArgument(f"an epoch belongs to one subscription, these dead letters to {len(of)}: {sorted(of)}")
    ((provider, name),) = of
    current = _epochs(connection, provider, [name]).get(name)
    if current != epoch:
        raise Fenced(
            f"subscription {name!r} of {provider!r} is at epoch {current}, not {epoch}: somebody else has taken it over"
            if current is not None
            else f"subscription {name!r} of {provider!r} has been deleted"
        )


def _dead_letters(
    connection: Connection, provider: str, name: str | None, limit: int, after_id: int
) -> list[DeadLetter]:
    query = select(dead_letters).where(_of(dead_letters, provider, name), dead_letters.c.id > after_id)
    return [dead_letter_of(row) for row in connection.execute(query.order_by(dead_letters.c.id).limit(limit))]


def _dead_letter(connection: Connection, letter_id: int) -> DeadLetter:
    row = connection.execute(select(dead_letters).where(dead_letters.c.id == letter_id)).one_or_none()
    if row is None:
        raise NotFound(f"there is no dead letter {letter_id}")
    return dead_letter_of(row)


def _chosen(provider: str, name: str, ids: Sequence[int] | None) -> list[ColumnElement[bool]]:
    """Conditions that together choose these dead letters of a subscription, each with a bounded number of ids."""
    whole = _of(dead_letters, provider, name)
    if ids is None:
        return [whole]
    unique = sorted(set(ids))
    chunks = [unique[at : at + _IDS_AT_ONCE] for at in range(0, len(unique), _IDS_AT_ONCE)]
    return [and_(whole, dead_letters.c.id.in_(chunk)) for chunk in chunks]


def _request_redrive(connection: Connection, provider: str, name: str, ids: Sequence[int] | None) -> int:
    _require_subscription(connection, provider, name)
    mark = update(dead_letters).values(redrive=True)
    return sum(connection.execute(mark.where(chosen)).rowcount for chosen in _chosen(provider, name, ids))


def _redrives(
    connection: Connection, provider: str, names: Sequence[str], queues: Sequence[int] | None, limit: int
) -> list[DeadLetter]:
    query = select(dead_letters).where(
        dead_letters.c.provider == provider, dead_letters.c.subscription.in_(names), dead_letters.c.redrive.is_(True)
    )
    if queues is not None:
        query = query.where(dead_letters.c.queue.in_(queues))
    return [dead_letter_of(row) for row in connection.execute(query.order_by(dead_letters.c.id).limit(limit))]


def _finish_redrive(connection: Connection, letter_id: int, delivered: bool, reason: str | None, attempts: int) -> None:
    this = dead_letters.c.id == letter_id
    if delivered:
        connection.execute(delete(dead_letters).where(this))
        return
    why = {} if reason is None else {"reason": printable(reason)}
    connection.execute(update(dead_letters).where(this).values(redrive=False, attempts=attempts, **why))


def _delete_dead_letters(connection: Connection, provider: str, name: str, ids: Sequence[int] | None) -> int:
    return sum(
        connection.execute(delete(dead_letters).where(chosen)).rowcount for chosen in _chosen(provider, name, ids)
    )


def _add_gaps(connection: Connection, records: Sequence[GapRecord], held: Mapping[int, int] | None) -> None:
    _require_leases(connection, records, held)
    if records:
        statement = _insert(connection, gaps).on_conflict_do_nothing()
        connection.execute(statement, [gap_row(record) for record in records])


def _left_behind(connection: Connection, provider: str, name: str) -> tuple[int, int]:
    letters, records = (
        connection.execute(select(func.count()).select_from(table).where(_of(table, provider, name))).scalar_one()
        for table in (dead_letters, gaps)
    )
    return letters, records


def _gaps(connection: Connection, provider: str, name: str | None) -> list[GapRecord]:
    rows = connection.execute(select(gaps).where(_of(gaps, provider, name)).order_by(gaps.c.id))
    return [gap_of(row) for row in rows]


def _add_token(connection: Connection, token: TokenRecord) -> None:
    row = token._asdict() | {"permissions": msgspec.json.encode(token.permissions).decode()}
    statement = _insert(connection, tokens).values(row).on_conflict_do_nothing(index_elements=["name"])
    if connection.execute(statement.returning(tokens.c.name)).first() is None:
        raise DefinitionConflict(f"a token named {token.name!r} exists: use another name, or revoke that one first")


def _tokens(connection: Connection) -> list[TokenRecord]:
    rows = connection.execute(select(tokens).order_by(tokens.c.name))
    return [_token_of(row) for row in rows]


def _token_of(row: Row[Any]) -> TokenRecord:
    try:
        permissions = msgspec.json.decode(row.permissions, type=dict[str, tuple[str, ...]])
    except msgspec.MsgspecError as error:
        raise DataDirectoryError(
            f"token {row.name!r} in the control store is damaged ({error}); revoke it and make it again"
        ) from None
    return TokenRecord(row.name, row.hash, permissions, row.created_at_us)


def _delete_token(connection: Connection, name: str) -> None:
    if not connection.execute(delete(tokens).where(tokens.c.name == name)).rowcount:
        raise NotFound(f"there is no token named {name!r}")


def _value(connection: Connection, key: str) -> str | None:
    return connection.execute(select(entries.c.value).where(entries.c.key == key)).scalar()


def _set_value(connection: Connection, key: str, value: str | None) -> None:
    if value is None:
        connection.execute(delete(entries).where(entries.c.key == key))
        return
    statement = _insert(connection, entries).values(key=key, value=value)
    connection.execute(statement.on_conflict_do_update(index_elements=["key"], set_={"value": value}))


def _value_or(connection: Connection, key: str, value: str) -> str:
    connection.execute(_insert(connection, entries).values(key=key, value=value).on_conflict_do_nothing())
    return connection.execute(select(entries.c.value).where(entries.c.key == key)).scalar_one()


def _orders(connection: Connection, provider: str, names: Sequence[str]) -> Orders:
    epochs = dict[str, int]()
    for some in (names[at : at + _IDS_AT_ONCE] for at in range(0, len(names), _IDS_AT_ONCE)):
        query = select(subscriptions.c.name, subscriptions.c.epoch)
        chosen = subscriptions.c.provider == provider, subscriptions.c.name.in_(some)
        epochs.update({row.name: row.epoch for row in connection.execute(query.where(*chosen))})
    stopped = select(entries.c.key).where(entries.c.key.startswith(_stopped_key(provider, ""), autoescape=True))
    return Orders(epochs, frozenset(int(key.rpartition("/")[2]) for key in connection.execute(stopped).scalars()))


def _set_stopped(connection: Connection, provider: str, queues: Sequence[int], stopped: bool) -> None:
    for queue in queues:
        _set_value(connection, _stopped_key(provider, queue), "" if stopped else None)


def _stopped_key(provider: str, queue: int | str) -> str:
    return f"stopped/{provider}/{queue}"
