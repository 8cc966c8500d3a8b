"""Positions of streams whose generation the control store has lost.

A seek raises the generation of its subscription in the control store, before events of the new generation are delivered
and move the positions in the user's database. So a position with a later generation than the control store has is left
from a seek that the control store lost, for example because it was restored from a backup. What is applied of such a
stream is what its position says, as if the seek had not been lost.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from ..streams.errors import HeadraceError, NotFound, Unavailable
from ..streams.identity import StreamId
from ..streams.transactions import EffectScope

log = logging.getLogger("headrace.effects")

MAX_STREAMS = 10_000
"""So many lost generations are kept in memory. Another one is asked for again."""


class LostGenerations:
    """The lost generations of streams in one scope."""

    def __init__(self, scope: EffectScope) -> None:
        self._scope = scope
        self._lost: OrderedDict[StreamId, int] = OrderedDict()
        self._is_logged = False

    def scope_of(self, stream: StreamId) -> EffectScope:
        """Return the scope with the generation in which the stream's events count."""
        lost = self._lost.get(stream)
        return self._scope if lost is None else self._scope._replace(generation=lost)

    async def find(self, stream: StreamId, later: int) -> bool:
        """The position of the stream has this later generation. Return whether the control store has lost it. Otherwise
        the scope is out of date, and what it delivers does not count. Raises Unavailable."""
        scope = self._scope
        if scope.current_generation is None:
            return False
        try:
            current = await scope.current_generation()
        except NotFound:  # the subscription was deleted
            return False
        except HeadraceError as error:
            raise Unavailable(
                f"the generation of subscription {scope.subscription!r} cannot be asked for: {error}"
            ) from error
        if scope.generation != current or later <= current:
            return False
        self._lost[stream] = later
        if len(self._lost) > MAX_STREAMS:
            self._lost.popitem(last=False)
        if not self._is_logged:
            self._is_logged = True
            log.warning(
                "subscription %r of %r: the position of stream %s has generation %d, and the control store has %d: it "
                "has lost a seek, for example by a restore; events after the position are applied, and earlier ones "
                "are not; the same holds for other streams of queue %d",
                scope.subscription, scope.provider, stream, later, current, scope.queue,
            )  # fmt: skip
        return True
