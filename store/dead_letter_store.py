"""Dead letters and gap records in the control store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, func, select, update

from ..streams.errors import Fenced, InvalidArgument, NotFound
from ..streams.identity import StreamId
from ..streams.subscriptions import DeadLetter, GapRecord, Selector
from .rows import dead_letter_of, dead_letter_row, gap_of, gap_row, printable
from .schema import GAP_IDENTITY, LETTER_IDENTITY, dead_letters, gaps
from .store_part import (
    IDS_AT_ONCE,
    ReadRows,
    StorePart,
    insert_into,
    lock_epochs,
    of_subscription,
    read_rows,
    require_leases,
    stored_definition,
    subscription_not_found,
)


class DeadLetterStore(StorePart):
    """Dead letters and gap records. See `headrace.store.control_store.ControlStore`."""

    async def add_dead_letters(
        self, letters: Sequence[DeadLetter], epoch: int | None, leases: Mapping[int, int] | None = None
    ) -> list[int]:
        """Store events that a subscription gave up on. Return their ids, in the same order.

        If the subscription has a dead letter of the same event, its reason, attempts and time are updated. An event is
        the same if position and content are equal: a queue that lost its end gives the same positions to other events.
        With an `epoch`, all letters must be of one subscription; raises Fenced if the subscription has another epoch by
        now. With `leases`, raises Fenced if `save_checkpoints` would refuse one of the queues.
        """
        held = None if leases is None else dict(leases)
        return await self._database.write(_add_dead_letters, list(letters), epoch, held)

    async def dead_letters(
        self, provider: str, subscription: str | None = None, *, limit: int = 100, after_id: int = 0
    ) -> list[DeadLetter]:
        """Return the first `limit` dead letters with an id above `after_id`, in the order of ids. For the next page
        pass the last id. Damaged dead letters are logged and left out."""
        chosen = and_(of_subscription(dead_letters, provider, subscription), dead_letters.c.id > after_id)
        return list(self._intact(await self._database.read(_dead_letters, chosen, limit)).values())

    async def dead_letters_at(
        self, provider: str, subscription: str, queue: int, offset: int, *, limit: int = 100
    ) -> list[DeadLetter]:
        """Return the first `limit` dead letters of the batch at an offset, in the order of ids. Damaged ones are logged
        and left out."""
        place = and_(dead_letters.c.queue == queue, dead_letters.c.token_offset == offset)
        chosen = and_(of_subscription(dead_letters, provider, subscription), place)
        return list(self._intact(await self._database.read(_dead_letters, chosen, limit)).values())

    async def last_dead_letter(
        self, provider: str, subscription: str, queue: int, stream: StreamId
    ) -> DeadLetter | None:
        """Return the dead letter of a stream with the highest id; None if there is none, or if it is damaged."""
        place = and_(dead_letters.c.queue == queue, dead_letters.c.stream == str(stream))
        chosen = and_(of_subscription(dead_letters, provider, subscription), place)
        return next(iter(self._intact(await self._database.read(_last_dead_letter, chosen)).values()), None)

    async def count_dead_letters(self, provider: str) -> dict[str, int]:
        """Return the number of dead letters by subscription, without subscriptions that have none."""
        return await self._database.read(_count_dead_letters, provider)

    async def dead_letter(self, letter_id: int) -> DeadLetter:
        """Return the dead letter with this id. Raises NotFound, and DataDirectoryError if it is damaged."""
        return await self._database.read(_dead_letter, letter_id)

    async def request_redrive(self, provider: str, subscription: str, ids: Sequence[int] | None = None) -> int:
        """Request that dead letters are delivered once more; None means all. Return how many were found.

        Dead letters of streams that the subscription does not select are of a deleted one with its name, and are left
        out. Raises NotFound if the subscription does not exist: no process would deliver them.
        """
        count = await self._database.write(_request_redrive, provider, subscription, ids)
        for notify in self._redrive_watchers:
            notify()
        return count

    def watch_redrives(self, notify: Callable[[], None]) -> None:
        """Call `notify` after each request of a redrive that is made through this object."""
        self._redrive_watchers.append(notify)

    async def redrives(
        self, provider: str, names: Sequence[str], *, queues: Collection[int] | None = None, limit: int = 100
    ) -> list[DeadLetter]:
        """Return the first `limit` dead letters of these subscriptions whose redrive was requested, in the order of
        ids; with `queues`, only dead letters of those queues. Damaged dead letters are logged and left out."""
        of_names, requested = dead_letters.c.subscription.in_(list(names)), dead_letters.c.redrive.is_(True)
        chosen = and_(dead_letters.c.provider == provider, of_names, requested)
        if queues is not None:
            chosen = and_(chosen, dead_letters.c.queue.in_(sorted(queues)))
        return list(self._intact(await self._database.read(_dead_letters, chosen, limit)).values())

    async def requested_redrives(
        self, provider: str, name: str, queue: int, first: int, last: int
    ) -> dict[int, list[int]]:
        """Return the positions of a queue from offset `first` to offset `last`, inclusive, that have a dead letter of
        this subscription whose redrive was requested: indexes by offset."""
        place = and_(dead_letters.c.queue == queue, dead_letters.c.token_offset.between(first, last))
        chosen = and_(of_subscription(dead_letters, provider, name), place, dead_letters.c.redrive.is_(True))
        return await self._database.read(_positions, chosen)

    async def finish_redrive(
        self, letter_id: int, *, delivered: bool, reason: str | None, attempts: int, failed_at_us: int
    ) -> None:
        """Store the result of a redrive. A delivered letter is deleted. A letter that failed again stays, with the new
        `attempts` and `failed_at_us` (microseconds since 1970 UTC) and, if given, `reason`. It is no error if the
        letter was deleted meanwhile.
        """
        failure: dict[str, Any] = {"attempts": attempts, "failed_at_us": failed_at_us}
        if reason is not None:
            failure["reason"] = printable(reason)
        await self._database.write(_finish_redrive, letter_id, delivered, failure)

    async def delete_dead_letters(
        self, provider: str, subscription: str, ids: Sequence[int] | None = None, selector: Selector | None = None
    ) -> int:
        """Delete dead letters of a subscription; None deletes all. Return their number. The subscription itself may
        already be deleted. With `selector`, only dead letters of streams that it matches are deleted."""
        return await self._database.write(_delete_dead_letters, provider, subscription, ids, selector)

    async def add_gaps(
        self, records: Sequence[GapRecord], epoch: int | None = None, leases: Mapping[int, int] | None = None
    ) -> None:
        """Store gap records. The same range of the same subscription is stored once.

        `epoch` and `leases` are as in `add_dead_letters`. Raises Fenced, and stores nothing, as that does.
        """
        await self._database.write(_add_gaps, list(records), epoch, None if leases is None else dict(leases))

    async def count_left_behind(
        self, provider: str, subscription: str, selector: Selector | None = None
    ) -> tuple[int, int]:
        """Return the numbers of dead letters and of gap records of a subscription. With `selector`, only dead letters
        of streams that it matches count."""
        return await self._database.read(_count_left_behind, provider, subscription, selector)

    async def gaps(self, provider: str, subscription: str | None = None) -> list[GapRecord]:
        """Return gap records in the order in which they were stored."""
        return await self._database.read(_gaps, provider, subscription)


# The work of each method, within its transaction


def _add_dead_letters(
    connection: Connection, letters: Sequence[DeadLetter], epoch: int | None, held: Mapping[int, int] | None
) -> list[int]:
    _require_epoch(connection, letters, epoch)
    require_leases(connection, letters, held)
    statement = insert_into(connection, dead_letters)
    statement = statement.on_conflict_do_update(
        index_elements=LETTER_IDENTITY,
        set_={column: statement.excluded[column] for column in ("reason", "attempts", "failed_at_us")},
    ).returning(dead_letters.c.id)
    return [connection.execute(statement, dead_letter_row(letter)).scalar_one() for letter in letters]


def _require_epoch(
    connection: Connection, records: Sequence[DeadLetter] | Sequence[GapRecord], epoch: int | None
) -> None:
    """Raise Fenced if the subscription of the records has another epoch than this one. None: any epoch will do."""
    if epoch is None or not records:
        return
    named = {(record.provider, record.subscription) for record in records}
    if len(named) > 1:
        raise InvalidArgument(f"an epoch belongs to one subscription, these records to {len(named)}: {sorted(named)}")
    ((provider, name),) = named
    current = lock_epochs(connection, provider, [name]).get(name)
    if current != epoch:
        raise Fenced(
            f"subscription {name!r} of {provider!r} is at epoch {current}, not {epoch}: another process took it over"
            if current is not None
            else f"subscription {name!r} of {provider!r} has been deleted"
        )


def _last_dead_letter(connection: Connection, chosen: ColumnElement[bool]) -> ReadRows[int, DeadLetter]:
    query = select(dead_letters).where(chosen).order_by(dead_letters.c.id.desc()).limit(1)
    return read_rows(connection.execute(query).all(), lambda row: row.id, dead_letter_of)


def _dead_letters(connection: Connection, chosen: ColumnElement[bool], limit: int) -> ReadRows[int, DeadLetter]:
    """Read `limit` intact dead letters: a caller takes a shorter result for the last page."""
    query = select(dead_letters).where(chosen).order_by(dead_letters.c.id)
    found = ReadRows[int, DeadLetter]({}, [])
    after_id = 0
    while len(found.intact) < limit:
        wanted = limit - len(found.intact)
        rows = connection.execute(query.where(dead_letters.c.id > after_id).limit(wanted)).all()
        read = read_rows(rows, lambda row: row.id, dead_letter_of)
        found.intact.update(read.intact)
        found.damaged.extend(read.damaged)
        if len(rows) < wanted:
            break
        after_id = rows[-1].id
    return found


def _dead_letter(connection: Connection, letter_id: int) -> DeadLetter:
    row = connection.execute(select(dead_letters).where(dead_letters.c.id == letter_id)).one_or_none()
    if row is None:
        raise NotFound(f"there is no dead letter {letter_id}")
    return dead_letter_of(row)


def _chosen(
    connection: Connection, provider: str, name: str, ids: Sequence[int] | None, selector: Selector | None
) -> list[ColumnElement[bool]]:
    """Return conditions that together match these dead letters. Each has at most `IDS_AT_ONCE` ids."""
    all_letters = of_subscription(dead_letters, provider, name)
    conditions = [all_letters] if ids is None else _with_ids(all_letters, ids)
    if selector is None:
        return conditions
    matches = _matcher_of_texts(selector)
    query = select(dead_letters.c.id, dead_letters.c.stream)
    rows = (row for condition in conditions for row in connection.execute(query.where(condition)))
    return _with_ids(all_letters, (row.id for row in rows if matches(row.stream)))


def _with_ids(letters: ColumnElement[bool], ids: Iterable[int]) -> list[ColumnElement[bool]]:
    unique = sorted(set(ids))
    chunks = [unique[at : at + IDS_AT_ONCE] for at in range(0, len(unique), IDS_AT_ONCE)]
    return [and_(letters, dead_letters.c.id.in_(chunk)) for chunk in chunks]


def _matcher_of_texts(selector: Selector) -> Callable[[object], bool]:
    """Return a predicate: whether the selector matches a stream as it is stored. It never matches a damaged one."""
    matches = selector.matcher()

    def matches_text(text: object) -> bool:
        try:
            return isinstance(text, str) and matches(StreamId.parse(text))
        except InvalidArgument:
            return False

    return matches_text


def _request_redrive(connection: Connection, provider: str, name: str, ids: Sequence[int] | None) -> int:
    lock_epochs(connection, provider, [name])  # a concurrent deletion waits, and then cancels the redrives
    definition = stored_definition(connection, provider, name)
    if definition is None:
        raise subscription_not_found(provider, name)
    mark = update(dead_letters).values(redrive=True)
    chosen = _chosen(connection, provider, name, ids, definition.selector)
    return sum(connection.execute(mark.where(condition)).rowcount for condition in chosen)


def _positions(connection: Connection, chosen: ColumnElement[bool]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    query = select(dead_letters.c.token_offset, dead_letters.c.token_index).where(chosen)
    for offset, index in connection.execute(query):
        found.setdefault(offset, []).append(index)
    return found


def _finish_redrive(connection: Connection, letter_id: int, delivered: bool, failure: Mapping[str, Any]) -> None:
    this = dead_letters.c.id == letter_id
    if delivered:
        connection.execute(delete(dead_letters).where(this))
        return
    connection.execute(update(dead_letters).where(this).values(redrive=False, **failure))


def _delete_dead_letters(
    connection: Connection, provider: str, name: str, ids: Sequence[int] | None, selector: Selector | None
) -> int:
    chosen = _chosen(connection, provider, name, ids, selector)
    return sum(connection.execute(delete(dead_letters).where(condition)).rowcount for condition in chosen)


def _add_gaps(
    connection: Connection, records: Sequence[GapRecord], epoch: int | None, held: Mapping[int, int] | None
) -> None:
    _require_epoch(connection, records, epoch)
    require_leases(connection, records, held)
    if records:
        inserted = insert_into(connection, gaps)
        # The same offsets may be lost again, for another reason: then the last one counts.
        changed = {name: inserted.excluded[name] for name in ("reason", "at_us")}
        is_other = gaps.c.reason != inserted.excluded.reason
        statement = inserted.on_conflict_do_update(index_elements=GAP_IDENTITY, set_=changed, where=is_other)
        connection.execute(statement, [gap_row(record) for record in records])


def _count_dead_letters(connection: Connection, provider: str) -> dict[str, int]:
    name = dead_letters.c.subscription
    query = select(name, func.count()).where(dead_letters.c.provider == provider).group_by(name)
    return {row[0]: row[1] for row in connection.execute(query)}


def _count_left_behind(connection: Connection, provider: str, name: str, selector: Selector | None) -> tuple[int, int]:
    of_name, number = of_subscription(dead_letters, provider, name), select(func.count())
    if selector is None:
        letters: int = connection.execute(number.select_from(dead_letters).where(of_name)).scalar_one()
    else:
        matches = _matcher_of_texts(selector)
        streams = select(dead_letters.c.stream, func.count()).where(of_name).group_by(dead_letters.c.stream)
        letters = sum(count for stream, count in connection.execute(streams) if matches(stream))
    records = number.select_from(gaps).where(of_subscription(gaps, provider, name))
    return letters, connection.execute(records).scalar_one()


def _gaps(connection: Connection, provider: str, name: str | None) -> list[GapRecord]:
    rows = connection.execute(select(gaps).where(of_subscription(gaps, provider, name)).order_by(gaps.c.id))
    return [gap_of(row) for row in rows]
