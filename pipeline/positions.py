"""The range that a query reads of each queue. Pure, except for the lookup of times."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from ..streams.errors import InvalidArgument
from ..streams.identity import StreamId
from ..streams.subscriptions import Selector
from .access import QueueAccess, RetainedRange
from .options import (
    EARLIEST,
    LATEST,
    OFFSET_EARLIEST,
    OFFSET_LATEST,
    OffsetPositions,
    Position,
    TimePosition,
    TokenPosition,
)

Offset = dict[str, int | str]
"""A query's progress as Spark stores it: the next offset of each queue (keys are the queues' numbers as text, in their
order), the log's identity and the streams. Spark compares it as text."""

_LOG, _STREAMS = "log", "streams"


def spark_offset(offsets: Sequence[int], access: QueueAccess, selector: Selector) -> Offset:
    offset: Offset = {str(queue): offset for queue, offset in enumerate(offsets)}
    if access.identity is not None:
        offset[_LOG] = access.identity
    return offset | {_STREAMS: selector.pattern}


class QueryProgress(NamedTuple):
    """The progress of a query."""

    offsets: list[int]
    is_same_log: bool
    """Whether the offsets are of these queues, not of an earlier log or one elsewhere."""


def from_spark(offset: Mapping[str, Any], access: QueueAccess, selector: Selector) -> QueryProgress:
    """Parse an offset of Spark. Raise InvalidArgument if it is of other streams, or of another number of queues."""
    queues = [name for name in offset if name.isdecimal()]
    if set(queues) != {str(queue) for queue in range(access.queues)}:
        raise InvalidArgument(
            f"the query's checkpoint knows queues {', '.join(sorted(queues, key=int))}, and the provider has "
            f"{access.queues}: the checkpoint is of another provider; use another checkpointLocation"
        )
    if offset.get(_STREAMS, selector.pattern) != selector.pattern:
        raise InvalidArgument(
            f"the query's checkpoint is of the streams {offset[_STREAMS]}, and 'namespace' and 'key' select "
            f"{selector.pattern}, whose earlier events the query would miss: use another checkpointLocation"
        )
    is_same_log = access.identity is None or offset.get(_LOG, access.identity) == access.identity
    return QueryProgress([int(offset[str(queue)]) for queue in range(access.queues)], is_same_log)


def lag(progress: Mapping[str, Any]) -> int:
    """Return the number of stored batches that a streaming query has not read yet, from its `lastProgress`.

    A query has one source or several: the sources of other formats are left out. A batch is all events that one
    `publish` call stored for one stream. Raise InvalidArgument if the progress has no source of the format `headrace`.
    """
    found = [_lag(source) for source in progress["sources"]]
    lags = [each for each in found if each is not None]
    if not lags:
        raise InvalidArgument("the query's progress has no source of the format headrace")
    return sum(lags)


def _lag(source: Mapping[str, Any]) -> int | None:
    end, latest = _offsets(source.get("endOffset")), _offsets(source.get("latestOffset"))
    if end is None or latest is None:
        return None
    return sum(max(latest[queue] - end.get(queue, 0), 0) for queue in latest)


def _offsets(text: str | None) -> dict[str, int] | None:
    """Return the next offset of each queue. None: the text is not of this source."""
    offset: Any = json.loads(text) if text else None
    if not isinstance(offset, dict) or _STREAMS not in offset:
        return None
    return {name: value for name, value in cast("dict[str, int]", offset).items() if name.isdecimal()}


def resolve(option: str, position: Position, selector: Selector, access: QueueAccess) -> list[int]:
    """Return the position in each queue. A queue that is not named is read from the earliest one, or up to the latest.

    Raise InvalidArgument, naming the option (`start` or `end`), for a position beyond the end of a queue.
    """
    states = access.states()
    match position:
        case TimePosition(time_us):
            return list(access.offsets_at(time_us))
        case OffsetPositions(by_queue):
            return _named(option, by_queue, states)
        case TokenPosition(offset):
            queues = access.queues_with(StreamId.parse(selector.pattern))
            if len(queues) > 1:
                raise InvalidArgument(
                    f"option {option!r}: a token is a position in one queue, and any queue may have events of "
                    f'{selector.pattern!r}: give offsets by queue, {{"QUEUE": OFFSET, …}}'
                )
            return _named(option, {queues[0]: offset}, states)
        case _:
            assert position in (EARLIEST, LATEST)
            return [state.first if position == EARLIEST else state.next for state in states]


def _named(option: str, offsets: Mapping[int, int], states: Sequence[RetainedRange]) -> list[int]:
    names = f"options {option!r} and '{option}ingOffsets'"
    for queue, offset in offsets.items():
        if queue not in range(len(states)):
            raise InvalidArgument(f"{names}: there is no queue {queue}, there are queues 0 to {len(states) - 1}")
        if offset > states[queue].next:
            raise InvalidArgument(f"{names}: queue {queue} ends at offset {states[queue].next}, before {offset}")
    default = OFFSET_EARLIEST if option == "start" else OFFSET_LATEST
    return [_offset(offsets.get(queue, default), state) for queue, state in enumerate(states)]


def _offset(offset: int, state: RetainedRange) -> int:
    if offset == OFFSET_EARLIEST:
        return state.first
    return state.next if offset == OFFSET_LATEST else offset


def shares(backlogs: Sequence[int], limit: int) -> list[int]:
    """Divide a limit in proportion to the backlogs, with at least one for each queue that has a backlog.

    The sum is at most `limit`, unless more queues than `limit` have a backlog.
    """
    total = sum(backlogs)
    if total <= limit:
        return list(backlogs)
    dealt = [max(limit * backlog // total, min(backlog, 1)) for backlog in backlogs]
    while sum(dealt) > max(limit, sum(1 for backlog in backlogs if backlog)):
        dealt[dealt.index(max(dealt))] -= 1
    return dealt
