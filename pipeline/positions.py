"""From where to where a query reads each queue. Pure, but for looking up times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..balancer import StreamQueueMapper
from ..streams.errors import InvalidArgument
from ..streams.identity import StreamId
from ..streams.subscriptions import Selector
from .access import QueueAccess, QueueState
from .options import EARLIEST, LATEST, At, Offsets, Position, Token

Offset = dict[str, int | str]
"""What Spark keeps of a query's progress: the next offset of each queue, the queues' numbers as text, in their order;
and whose they are. Spark compares it as text."""

_LOG, _STREAMS = "log", "streams"


def spark_offset(offsets: Sequence[int], access: QueueAccess, selector: Selector) -> Offset:
    offset: Offset = {str(queue): offset for queue, offset in enumerate(offsets)}
    if access.identity is not None:
        offset[_LOG] = access.identity
    return offset | {_STREAMS: selector.pattern}


class Progress(NamedTuple):
    """How far a query came."""

    offsets: list[int]
    same: bool
    """They are of these queues: not of a log that was here before, or elsewhere."""


def from_spark(offset: Mapping[str, Any], access: QueueAccess, selector: Selector) -> Progress:
    """Raises InvalidArgument where it is of other streams, or of another number of queues."""
    queues = [name for name in offset if name.isdecimal()]
    if set(queues) != {str(queue) for queue in range(access.queues)}:
        raise InvalidArgument(
            f"the query's checkpoint knows queues {', '.join(sorted(queues, key=int))}, and the provider has "
            f"{access.queues}: the checkpoint is of another provider; use another checkpointLocation"
        )
    if offset.get(_STREAMS, selector.pattern) != selector.pattern:
        raise InvalidArgument(
            f"the query's checkpoint is of the streams {offset[_STREAMS]}, and 'namespace' and 'key' select "
            f"{selector.pattern}, of which it would miss what is past: use another checkpointLocation"
        )
    same = access.identity is None or offset.get(_LOG, access.identity) == access.identity
    return Progress([int(offset[str(queue)]) for queue in range(access.queues)], same)


def resolve(option: str, position: Position, selector: Selector, access: QueueAccess) -> list[int]:
    """The position in each queue. A queue that is not named is read from the earliest one, or up to the latest.

    Raises InvalidArgument, naming the option, for a position beyond the end of a queue.
    """
    states = access.states()
    match position:
        case At(time_us):
            return list(access.offsets_at(time_us))
        case Offsets(by_queue):
            return _named(option, by_queue, states)
        case Token(offset):
            queue = StreamQueueMapper(access.queues).queue_of(StreamId.parse(selector.pattern))
            return _named(option, {queue: offset}, states)
        case _:
            assert position in (EARLIEST, LATEST)
            return [state.first if position == EARLIEST else state.next for state in states]


def _named(option: str, offsets: Mapping[int, int], states: Sequence[QueueState]) -> list[int]:
    for queue, offset in offsets.items():
        if queue not in range(len(states)):
            raise InvalidArgument(f"option {option!r} names queue {queue}: there are queues 0 to {len(states) - 1}")
        if offset > states[queue].next:
            raise InvalidArgument(
                f"option {option!r} names offset {offset} of queue {queue}, which ends at {states[queue].next}"
            )
    others = [state.first if option == "start" else state.next for state in states]
    return [offsets.get(queue, other) for queue, other in enumerate(others)]


def shares(backlogs: Sequence[int], limit: int) -> list[int]:
    """Deal a limit out in proportion to what waits, at least one to each that has something.

    The sum is at most `limit`, where that is at least the number of queues with something.
    """
    total = sum(backlogs)
    if total <= limit:
        return list(backlogs)
    dealt = [max(limit * backlog // total, min(backlog, 1)) for backlog in backlogs]
    while sum(dealt) > max(limit, sum(1 for backlog in backlogs if backlog)):
        dealt[dealt.index(max(dealt))] -= 1
    return dealt
