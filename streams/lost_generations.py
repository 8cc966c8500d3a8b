"""Positions of effects from seeks that the control store has lost.

A seek raises the generation of its subscription in the control store, before events of the new generation are delivered
and move the positions in the user's database. So a position with a later generation than the control store has is left
from a seek that the control store lost, for example because it was restored from a backup. Events after that position
are applied, earlier ones are not.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from .errors import HeadraceError, NotFound, Unavailable
from .identity import StreamId

log = logging.getLogger("headrace.effects")

MAX_STREAMS = 10_000
"""Most streams whose lost generation is kept in memory. For others, the control store is asked again."""

CurrentGeneration = Callable[[], Awaitable[int | None]]
"""Asks the control store for the generation of a subscription. None: it is not known, because the silo has an older
version. Raises NotFound, and Unavailable."""


class LostGenerations:
    """The lost generations of streams of one queue, while its subscription has one generation."""

    def __init__(self, subscription: str, queue: int, generation: int, current: CurrentGeneration) -> None:
        self._subscription = subscription
        self._queue = queue
        self._generation = generation
        self._current = current
        self._lost: OrderedDict[StreamId, int] = OrderedDict()
        self._is_logged = False

    def get(self, stream: StreamId) -> int | None:
        """The lost generation in which the events of this stream count; None if it has none."""
        if not self._lost or (lost := self._lost.get(stream)) is None:
            return None
        self._lost.move_to_end(stream)
        return lost

    async def is_lost(self, stream: StreamId, later: int) -> bool:
        """Return True if the control store has lost generation `later` of the stream's position. False: what is
        delivered is out of date, so it is not applied. Raises Unavailable."""
        try:
            current = await self._current()
        except NotFound:  # the subscription was deleted
            return False
        except HeadraceError as error:
            raise Unavailable(f"the generation of subscription {self._subscription!r} is not known: {error}") from error
        if current is None:
            raise Unavailable(
                f"the generation of subscription {self._subscription!r} is not known: the silo has an older version"
            )
        if current != self._generation or later <= current:
            return False
        self._lost[stream] = later
        if len(self._lost) > MAX_STREAMS:
            self._lost.popitem(last=False)
        if not self._is_logged:
            self._is_logged = True
            log.warning(
                "subscription %r: the position of stream %s has generation %d, and the control store has %d: it has "
                "lost a seek, for example by a restore; events after the position are applied, and earlier ones are "
                "not; the same holds for other streams of queue %d",
                self._subscription, stream, later, current, self._queue,
            )  # fmt: skip
        return True
