"""Positions in the queues of a provider: beginnings, ends, and the checkpoints that a start means."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from ..streams.errors import InvalidArgument, NotSupported
from ..streams.identity import SequenceToken, StreamId
from ..streams.subscriptions import Checkpoint, Selector, Start, StartKind, StreamBehind
from .opening import ProviderParts

UNREAD_S = 0.05
"""Interval of looking whether a queue without an order has unread events, in seconds."""


def past_the_end(token: SequenceToken, queue: int) -> InvalidArgument:
    return InvalidArgument(f"token {token} is past the end of queue {queue}: take the token of a stored event")


class QueuePositions:
    """The part of a provider that knows its queues."""

    def __init__(self, parts: ProviderParts) -> None:
        self.name = parts.options.name
        self.queues = parts.mapper.queues
        self.queue_of = parts.mapper.queue_of
        self.queues_with = parts.mapper.queues_with
        self.adapter = parts.adapter
        self.adapter_name = parts.adapter_name
        self.store = parts.store
        self.data = parts.directory.path if parts.directory else None

    def queues_of(self, selector: Selector) -> Sequence[int]:
        """The queues that hold streams which a selector matches."""
        return self.queues_with(StreamId.parse(selector.pattern)) if selector.explicit else range(self.queues)

    async def positions(self, selector: Selector, start: Start) -> dict[int, Checkpoint]:
        """The checkpoints that `start` means, by queue.

        A token is a position in one queue. Raises InvalidArgument for a token if the subscription has several queues.
        """
        stream = StreamId.parse(selector.pattern) if selector.explicit else None
        queues = self.queues_of(selector)
        if start.kind is StartKind.OFFSETS:
            if stream is None:
                raise InvalidArgument(
                    f"a token is a position in one queue, so only a subscription to one stream can go to it, not "
                    f"{selector.pattern!r}; use a time instead"
                )
            if len(queues) > 1:
                raise InvalidArgument(
                    f"a token is a position in one queue, and any queue of provider {self.name!r} may have events of "
                    f"{stream}; use a time instead"
                )
            assert start.token is not None
            return {queues[0]: await self._at_token(stream, queues[0], SequenceToken.parse(start.token))}
        return {queue: Checkpoint(await self._offset(queue, start)) for queue in queues}

    async def _offset(self, queue: int, start: Start) -> int:
        if start.kind is StartKind.TIME:
            assert start.time_us is not None
            return await self.adapter.offset_at(queue, start.time_us)
        bounds = await self.adapter.bounds(queue)
        return bounds.first if start.kind is StartKind.EARLIEST else bounds.next

    async def _at_token(self, stream: StreamId, queue: int, token: SequenceToken) -> Checkpoint:
        if not self.adapter.capabilities.rewindable:
            raise NotSupported("a token is a start only if the adapter can rewind")
        bounds = await self.adapter.bounds(queue)
        if token > (bounds.next, 0):
            raise past_the_end(token, queue)
        if not token.index:
            return Checkpoint(token.offset)
        return Checkpoint(token.offset + 1, {stream: StreamBehind(token)})

    async def ends(self, queue: int, positions: Iterable[int]) -> Mapping[int, int]:
        """The end of a queue, by position: end minus position is the number of batches that are due in between.

        If the adapter keeps no order, this is not the queue's own end, because its offsets do not count batches.
        """
        if self.adapter.capabilities.ordered:
            return dict.fromkeys(positions, (await self.adapter.bounds(queue)).next)
        return {position: position + (await self.adapter.backlog(queue, position)).batches for position in positions}

    async def due_end(self, queue: int) -> int:
        """Return the offset below which all due events of a queue are.

        If the adapter keeps no order, the call returns when some process has read all of them: the adapter knows the
        offset only then.
        """
        while (end := await self.adapter.due_end(queue)) is None:  # noqa: ASYNC110 (another process may read them)
            await asyncio.sleep(UNREAD_S)
        return end
