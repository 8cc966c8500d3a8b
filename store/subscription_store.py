"""Subscriptions in the control store: definitions, epochs, checkpoints, stopped queues."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, case, delete, or_, select, update

from ..streams.clock import now_us
from ..streams.errors import DataDirectoryError, DefinitionConflict
from ..streams.identity import StreamId
from ..streams.progress import ControlRequests, RefusedProgress, SubscriptionAttachment
from ..streams.subscriptions import (
    Checkpoint,
    SubscriptionDefinition,
    is_consumers_position,
    is_position_of,
    parent_name,
    parent_of,
    redefined,
)
from .checksums import check_row, with_checksum
from .rows import checkpoint_of, checkpoint_row, definition_of, definition_text, differences, plain
from .schema import checkpoints, counters, dead_letters, entries, gaps, subscriptions
from .store_part import (
    IDS_AT_ONCE,
    ReadRows,
    StorePart,
    insert_into,
    is_subscription,
    lock_epochs,
    of_subscription,
    read_rows,
    refused_queues,
    require_subscription,
    store_value,
    stored_definition,
    subscription_not_found,
)

_log = logging.getLogger(__name__)


class SubscriptionStore(StorePart):
    """Subscriptions and their progress. See `headrace.store.control_store.ControlStore`."""

    async def create_subscription(
        self, provider: str, definition: SubscriptionDefinition, start: Mapping[int, Checkpoint]
    ) -> bool:
        """Store a definition and its start position in each queue. Return False, and change nothing, if the
        subscription exists with an equal definition.

        Raises DefinitionConflict, which names the fields that differ, if it exists with another definition. The
        position of one consumer with mode broadcast needs the consumer's subscription: raises NotFound without it, and
        Fenced if it has another definition.
        """
        return await self._database.write(_create_subscription, provider, definition, plain(start))

    async def subscription(self, provider: str, name: str) -> SubscriptionDefinition:
        """Return a subscription's definition. Raises NotFound."""
        return await self._database.read(_subscription, provider, name)

    async def subscriptions(self, provider: str) -> list[SubscriptionDefinition]:
        """Return all subscriptions of a provider, in the order of names."""
        return await self._database.read(_subscriptions, provider)

    async def delete_subscription(self, provider: str, name: str) -> None:
        """Delete a subscription, its checkpoints and its gap records, and with mode broadcast also those of its
        consumers, in one transaction. A process that is attached to one of them is fenced.

        Its dead letters stay until they are deleted themselves: they may be the last copies of their events. Requested
        redrives are cancelled. Raises NotFound.
        """
        await self._database.write(_delete_subscription, provider, name)

    async def attach(self, provider: str, name: str, *, exclusive: bool = True) -> SubscriptionAttachment:
        """Take over a subscription, under a new epoch that is higher than all before. Raises NotFound.

        If not `exclusive`, share the current epoch with the other attached processes: then the leases of queues
        decide which process writes the progress of a queue.
        """
        if exclusive:
            return await self._database.write(_attach, provider, name)
        return await self._database.read(_share_epoch, provider, name)

    async def save_checkpoints(
        self,
        provider: str,
        progress: Sequence[tuple[str, int, Mapping[int, Checkpoint]]],
        leases: Mapping[int, int] | None = None,
        *,
        revision: int = 0,
    ) -> RefusedProgress:
        """Store the progress of several subscriptions, given as (name, epoch, checkpoint per queue). Return the
        subscriptions and queues that were refused: nothing was written for them, and everything else was written.

        A subscription is refused if its epoch is no longer the given one. With `leases` (epoch of the lease by queue),
        a queue is refused if its lease was granted again or released since, or if `leases` does not have it. An
        expired lease that was not granted again still counts.

        `revision` is the caller's number of this call. A call may be carried out late, after a newer one, if its
        connection was lost. So a checkpoint is ignored if its revision, or its `next_offset`, is lower than the stored
        one, and epoch and lease are the same.
        """
        copies = [(name, epoch, plain(positions)) for name, epoch, positions in progress]
        held = None if leases is None else dict(leases)
        return await self._database.write(_save_checkpoints, provider, copies, held, revision)

    async def checkpoints(self, provider: str, name: str) -> Mapping[int, Checkpoint]:
        """Return a subscription's checkpoints by queue. Raises NotFound, and DataDirectoryError if one is damaged."""
        return await self._database.read(_checkpoints_or_not_found, provider, name)

    async def checkpoints_of_queue(self, provider: str, queue: int) -> dict[str, Checkpoint]:
        """Return the checkpoints of all subscriptions in a queue, by name. Subscriptions that do not read the queue are
        missing. A damaged checkpoint is logged and left out."""
        return self._intact(await self._database.read(_checkpoints_of_queue, provider, queue))

    async def generation(self, provider: str, name: str) -> int:
        """Return the generation of a subscription. Raises NotFound."""
        return await self._database.read(_generation, provider, name)

    async def seek(self, provider: str, name: str, positions: Mapping[int, Checkpoint], reason: str) -> int:
        """Move a subscription in the given queues, forwards or backwards, and raise its generation. Return its new
        epoch: a process that is attached is fenced. Damaged checkpoints of the subscription are replaced or deleted.
        Raises NotFound.
        """
        epoch = await self._database.write(_seek, provider, name, plain(positions))
        offsets = {queue: position.next_offset for queue, position in sorted(positions.items())}
        _log.info("subscription %r of %r moved to %s (epoch %d): %s", name, provider, offsets, epoch, reason)
        return epoch

    async def resume(self, provider: str, name: str, stream: StreamId) -> bool:
        """Let a paused stream go on. Return False if it is not paused. A process that is attached is fenced, but the
        generation stays. Raises NotFound, and DataDirectoryError if a checkpoint is damaged."""
        return await self._database.write(_resume, provider, name, stream)

    async def watermarks(self, provider: str, *, apart_from: Sequence[str] = ()) -> dict[int, int]:
        """Return, by queue, the lowest offset that a subscription still needs. A queue that no subscription reads is
        missing.

        Subscriptions named in `apart_from` do not count. Raises DataDirectoryError if a checkpoint of another
        subscription is damaged: the offset that it needs is not known.
        """
        return await self._database.read(_watermarks, provider, list(apart_from))

    async def control_requests(self, provider: str, names: Sequence[str]) -> ControlRequests:
        """Return the requests about these subscriptions and about queues."""
        return await self._database.read(_control_requests, provider, list(names))

    async def stop_queues(self, provider: str, queues: Sequence[int]) -> None:
        """Request that no process reads these queues until `start_queues`."""
        await self._database.write(_set_stopped, provider, list(queues), True)

    async def start_queues(self, provider: str, queues: Sequence[int]) -> None:
        """Allow that these queues are read again."""
        await self._database.write(_set_stopped, provider, list(queues), False)


# The work of each method, within its transaction


def _generation(connection: Connection, provider: str, name: str) -> int:
    found = connection.execute(select(subscriptions.c.generation).where(is_subscription(provider, name))).scalar()
    if found is None:
        raise subscription_not_found(provider, name)
    return found


def _create_subscription(
    connection: Connection, provider: str, definition: SubscriptionDefinition, start: Mapping[int, Checkpoint]
) -> bool:
    row = {"provider": provider, "name": definition.name, "definition": definition_text(definition), "epoch": 0}
    statement = insert_into(connection, subscriptions).values(row).on_conflict_do_nothing()
    while connection.execute(statement.returning(subscriptions.c.name)).first() is None:
        stored = stored_definition(connection, provider, definition.name)
        if stored is not None:  # else it was deleted in between
            _require_parent(connection, provider, definition)
            _require_equal(stored, definition)
            return False
    epoch = _new_epoch(connection, provider, definition.name)  # a deleted one with this name had another
    _set_first_generation(connection, provider, definition.name)
    _require_parent(connection, provider, definition)
    if not is_consumers_position(definition):
        # A silo of version 0.2.0 may have left positions of a deleted subscription with this name, of any mode.
        _delete_all(connection, provider, _lock_consumers(connection, provider, definition.name))
    _write_checkpoints(connection, _checkpoint_rows(provider, definition.name, epoch, start))
    return True


def _require_parent(connection: Connection, provider: str, definition: SubscriptionDefinition) -> None:
    """Lock the subscription, so that it is not deleted before this transaction ends."""
    if not is_consumers_position(definition):
        return
    wanted = parent_of(definition)
    lock_epochs(connection, provider, [wanted.name])
    stored = stored_definition(connection, provider, wanted.name)
    if stored is None:
        raise subscription_not_found(provider, wanted.name)
    if stored != wanted:
        raise redefined(wanted.name)


def _set_first_generation(connection: Connection, provider: str, name: str) -> None:
    """Call this after the row is inserted: the insertion waits for a transaction that deletes one with this name."""
    first = connection.execute(select(counters.c.value).where(counters.c.name == "generation")).scalar()
    if first:
        this = is_subscription(provider, name)
        connection.execute(update(subscriptions).where(this).values(generation=first))


def _require_equal(stored: SubscriptionDefinition, wanted: SubscriptionDefinition) -> None:
    if stored != wanted:
        raise DefinitionConflict(
            f"subscription {parent_name(stored.name)!r} exists with another definition: {differences(stored, wanted)}; "
            "give the stored values, use another name, or give its progress up with 'headrace subscriptions delete' "
            "and create it again"
        )


def _subscription(connection: Connection, provider: str, name: str) -> SubscriptionDefinition:
    stored = stored_definition(connection, provider, name)
    if stored is None:
        raise subscription_not_found(provider, name)
    return stored


def _subscriptions(connection: Connection, provider: str) -> list[SubscriptionDefinition]:
    query = select(subscriptions.c.definition).where(subscriptions.c.provider == provider)
    return [definition_of(text) for text in connection.execute(query.order_by(subscriptions.c.name)).scalars()]


def _delete_subscription(connection: Connection, provider: str, name: str) -> None:
    lock = select(subscriptions.c.name).where(is_subscription(provider, name)).with_for_update()
    if connection.execute(lock).first() is None:
        raise subscription_not_found(provider, name)
    # A consumer that joined before this lock has stored its position. One that joins later finds no subscription.
    _delete_all(connection, provider, [name, *_lock_consumers(connection, provider, name)])


def _lock_consumers(connection: Connection, provider: str, name: str) -> list[str]:
    """Return the names of the positions of a subscription's consumers, and lock them until this transaction ends."""
    names = select(subscriptions.c.name).where(subscriptions.c.provider == provider).order_by(subscriptions.c.name)
    stored = connection.execute(names).scalars()
    own = [each for each in stored if is_position_of(each, name)]
    for some in (own[at : at + IDS_AT_ONCE] for at in range(0, len(own), IDS_AT_ONCE)):
        chosen = subscriptions.c.provider == provider, subscriptions.c.name.in_(some)
        connection.execute(select(subscriptions.c.name).where(*chosen).order_by(subscriptions.c.name).with_for_update())
    return own


def _delete_all(connection: Connection, provider: str, names: Sequence[str]) -> None:
    for name in names:
        deleted = delete(subscriptions).where(is_subscription(provider, name)).returning(subscriptions.c.generation)
        for generation in connection.execute(deleted).scalars():
            _raise_first_generation(connection, max(generation + 1, now_us()))
        connection.execute(delete(checkpoints).where(of_subscription(checkpoints, provider, name)))
        connection.execute(delete(gaps).where(of_subscription(gaps, provider, name)))
        requested = and_(of_subscription(dead_letters, provider, name), dead_letters.c.redrive.is_(True))
        connection.execute(update(dead_letters).where(requested).values(redrive=False))


def _raise_first_generation(connection: Connection, generation: int) -> None:
    """New subscriptions begin with this generation at least: acknowledgements for a deleted one of the same name do not
    count for them."""
    statement = insert_into(connection, counters).values(name="generation", value=generation)
    higher = statement.excluded["value"] > counters.c.value
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["name"], set_={"value": statement.excluded["value"]}, where=higher
        )
    )


def _attach(connection: Connection, provider: str, name: str) -> SubscriptionAttachment:
    _new_epoch(connection, provider, name)
    return _share_epoch(connection, provider, name)


def _share_epoch(connection: Connection, provider: str, name: str) -> SubscriptionAttachment:
    columns = subscriptions.c
    query = select(columns.epoch, columns.generation, columns.definition).where(is_subscription(provider, name))
    row = connection.execute(query).one_or_none()
    if row is None:
        raise subscription_not_found(provider, name)
    positions = _checkpoints(connection, provider, name)
    return SubscriptionAttachment(row.epoch, positions, row.generation, definition_of(row.definition))


def _new_epoch(connection: Connection, provider: str, name: str) -> int:
    count = update(counters).where(counters.c.name == "epoch").values(value=counters.c.value + 1)
    epoch: int = connection.execute(count.returning(counters.c.value)).scalar_one()
    if not connection.execute(
        update(subscriptions).where(is_subscription(provider, name)).values(epoch=epoch)
    ).rowcount:
        raise subscription_not_found(provider, name)
    return epoch


def _save_checkpoints(
    connection: Connection,
    provider: str,
    progress: Sequence[tuple[str, int, Mapping[int, Checkpoint]]],
    held: Mapping[int, int] | None,
    revision: int,
) -> RefusedProgress:
    epochs = lock_epochs(connection, provider, [name for name, _, _ in progress])
    stale = [name for name, epoch, _ in progress if epochs.get(name) != epoch]
    current = [(name, epoch, positions) for name, epoch, positions in progress if epochs.get(name) == epoch]
    refused = refused_queues(connection, provider, {queue for _, _, each in progress for queue in each}, held)
    rows = [
        row | {"lease_epoch": (held or {}).get(row["queue"], 0), "revision": revision}
        for one in current
        for row in _checkpoint_rows(provider, *one)
        if row["queue"] not in refused
    ]
    _write_checkpoints(connection, rows)
    return RefusedProgress(stale, refused)


def _checkpoint_rows(provider: str, name: str, epoch: int, positions: Mapping[int, Checkpoint]) -> list[dict[str, Any]]:
    keys = {"provider": provider, "subscription": name, "epoch": epoch, "lease_epoch": 0, "revision": 0}
    rows = [keys | checkpoint_row(queue, position) for queue, position in positions.items()]
    return [with_checksum("checkpoints", row) for row in rows]


def _write_checkpoints(connection: Connection, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    rows = sorted(
        rows, key=lambda row: (row["subscription"], row["queue"])
    )  # every transaction locks checkpoints in this order
    statement = insert_into(connection, checkpoints)
    new, old = statement.excluded, checkpoints.c
    written = ("next_offset", "watermark", "behind", "epoch", "lease_epoch", "revision", "checksum")
    newer_lease = new["lease_epoch"] > old.lease_epoch
    same_lease = and_(new["lease_epoch"] == old.lease_epoch, new["revision"] >= old.revision)
    not_late = and_(new["next_offset"] >= old.next_offset, or_(newer_lease, same_lease))
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["provider", "subscription", "queue"],
            set_={column: new[column] for column in written},
            where=or_(new["epoch"] > old.epoch, not_late),
        ),
        rows,
    )


def _checkpoints(connection: Connection, provider: str, name: str) -> dict[int, Checkpoint]:
    query = select(checkpoints).where(of_subscription(checkpoints, provider, name)).order_by(checkpoints.c.queue)
    return {row.queue: checkpoint_of(row) for row in connection.execute(query)}


def _checkpoints_or_not_found(connection: Connection, provider: str, name: str) -> dict[int, Checkpoint]:
    require_subscription(connection, provider, name)
    return _checkpoints(connection, provider, name)


def _checkpoints_of_queue(connection: Connection, provider: str, queue: int) -> ReadRows[str, Checkpoint]:
    query = select(checkpoints).where(checkpoints.c.provider == provider, checkpoints.c.queue == queue)
    return read_rows(connection.execute(query), lambda row: row.subscription, checkpoint_of)


def _seek(connection: Connection, provider: str, name: str, positions: Mapping[int, Checkpoint]) -> int:
    epoch = _new_epoch(connection, provider, name)
    this, column = is_subscription(provider, name), subscriptions.c.generation
    now = now_us()
    raised = case((column + 1 < now, now), else_=column + 1)
    connection.execute(update(subscriptions).where(this).values(generation=raised))
    _delete_damaged_checkpoints(connection, provider, name)
    _write_checkpoints(connection, _checkpoint_rows(provider, name, epoch, positions))
    return epoch


def _resume(connection: Connection, provider: str, name: str, stream: StreamId) -> bool:
    if not _paused(_checkpoints_or_not_found(connection, provider, name), stream):
        return False
    epoch = _new_epoch(connection, provider, name)  # from here on, no other process can write progress
    resumed = {
        queue: at._replace(behind={**at.behind, stream: at.behind[stream]._replace(paused="")})
        for queue, at in _paused(_checkpoints(connection, provider, name), stream).items()
    }
    _write_checkpoints(connection, _checkpoint_rows(provider, name, epoch, resumed))
    return bool(resumed)


def _paused(stored: Mapping[int, Checkpoint], stream: StreamId) -> dict[int, Checkpoint]:
    return {queue: at for queue, at in stored.items() if stream in at.behind and at.behind[stream].paused}


def _delete_damaged_checkpoints(connection: Connection, provider: str, name: str) -> None:
    """The epoch and offset of a damaged checkpoint must not decide whether a new checkpoint is written."""
    for row in connection.execute(select(checkpoints).where(of_subscription(checkpoints, provider, name))).all():
        try:
            check_row("checkpoints", row)
        except DataDirectoryError:
            this = and_(of_subscription(checkpoints, provider, name), checkpoints.c.queue == row.queue)
            connection.execute(delete(checkpoints).where(this))


def _watermarks(connection: Connection, provider: str, apart_from: list[str]) -> dict[int, int]:
    counted = and_(checkpoints.c.provider == provider, checkpoints.c.subscription.not_in(apart_from))
    lowest: dict[int, int] = {}
    for row in connection.execute(select(checkpoints).where(counted)):
        check_row("checkpoints", row)
        lowest[row.queue] = min(row.watermark, lowest.get(row.queue, row.watermark))
    return lowest


def _control_requests(connection: Connection, provider: str, names: Sequence[str]) -> ControlRequests:
    epochs = dict[str, int]()
    for some in (names[at : at + IDS_AT_ONCE] for at in range(0, len(names), IDS_AT_ONCE)):
        query = select(subscriptions.c.name, subscriptions.c.epoch)
        chosen = subscriptions.c.provider == provider, subscriptions.c.name.in_(some)
        epochs.update({row.name: row.epoch for row in connection.execute(query.where(*chosen))})
    stopped = select(entries.c.key).where(entries.c.key.startswith(_stopped_key(provider, ""), autoescape=True))
    return ControlRequests(
        epochs, frozenset(int(key.rpartition("/")[2]) for key in connection.execute(stopped).scalars())
    )


def _set_stopped(connection: Connection, provider: str, queues: Sequence[int], stopped: bool) -> None:
    for queue in queues:
        store_value(connection, _stopped_key(provider, queue), "" if stopped else None)


def _stopped_key(provider: str, queue: int | str) -> str:
    return f"stopped/{provider}/{queue}"
