"""Beginnings and ends of queues for callers that may see some of the streams in them.

The offsets of a queue count the batches of all clients. A caller that sees only some namespaces gets the offset after
the last batch of those as the end. This end does not move when other clients publish. All batches that the caller may
read are below it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import NamedTuple

from ...adapters import Bounds, QueueAdapter
from ...server.access import Permission, Principal
from ...streams.errors import HeadraceError
from ...streams.events import EventBatch
from ...streams.identity import SequenceToken
from ...streams.subscriptions import Selector, Start
from ..provider_core import ProviderCore
from ..queue_positions import past_the_end

WINDOW = 256
"""Offsets that are searched together, from the end backwards. Windows begin at multiples of it at every silo. So one
silo never answers with an earlier end than another silo did before."""
SEARCH_BYTES = 64 << 20
"""Bytes of other clients after which the search stops. The answer is then as if the next batch were the caller's."""
COUNT_BYTES = 4 << 20
"""Most bytes that `selected_events` reads from a queue."""
PIECE_EVENTS, PIECE_BYTES = 1 << 20, 256 << 10
MAX_KNOWN = 10_000
"""Ends that are remembered; the least recently used is dropped first."""

_MAY_SEE = (Permission.SUBSCRIBE, Permission.MANAGE)


def sees_everything(principal: Principal) -> bool:
    return any(principal.allows_everywhere(permission) for permission in _MAY_SEE)


class _Known(NamedTuple):
    searched_to: int
    """All batches below were searched, except those before more than `search_bytes` of other clients."""
    first: int
    end: int


class VisibleBounds:
    """Finds and remembers the visible ends of each queue, for each set of namespaces."""

    def __init__(self, *, window: int = WINDOW, search_bytes: int = SEARCH_BYTES) -> None:
        self._window = window
        self._search_bytes = search_bytes
        self._known: OrderedDict[tuple[object, ...], _Known] = OrderedDict()
        self._searching: dict[tuple[object, ...], asyncio.Lock] = {}

    async def bounds(self, principal: Principal, provider: ProviderCore, queue: int) -> Bounds:
        """Return the offset of the first batch that the caller may see, and the offset after the last.

        Both are 0 if the adapter cannot rewind. Raises StorageError.
        """
        first, end = await provider.adapter.bounds(queue)
        if sees_everything(principal):
            return Bounds(first, end)
        if not provider.adapter.capabilities.rewindable:
            return Bounds(0, 0)
        key = (provider.name, queue, *(principal.grants.get(permission) for permission in _MAY_SEE))
        async with self._searching.setdefault(key, asyncio.Lock()):
            before = self._known.pop(key, _Known(first, 0, first))
            found = await self._end(provider.adapter, principal, queue, Bounds(max(first, before.searched_to), end))
            known_end = before.end if found is None else found
            known_first = before.first
            if known_first < first or known_end > before.end:
                known_first = await self._first(
                    provider.adapter, principal, queue, Bounds(max(first, known_first), known_end)
                )
            self._known[key] = _Known(end, known_first, known_end)
            if len(self._known) > MAX_KNOWN:
                self._searching.pop(self._known.popitem(last=False)[0], None)
        return Bounds(known_first, known_end)

    async def check_start(self, principal: Principal, provider: ProviderCore, selector: Selector, start: Start) -> None:
        """Raise InvalidArgument for a token after the last event that the caller may see.

        Accepting tokens up to the real end would reveal the end.
        """
        if start.token is None or not selector.explicit or not provider.adapter.capabilities.rewindable:
            return
        queues = provider.queues_of(selector)
        if len(queues) > 1:
            return  # the token is refused, wherever it is
        queue, token = queues[0], SequenceToken.parse(start.token)
        if not sees_everything(principal) and token > ((await self.bounds(principal, provider, queue)).next, 0):
            raise past_the_end(token, queue)

    async def offset_at(self, principal: Principal, provider: ProviderCore, queue: int, time_us: int) -> int:
        """Return the offset of the first visible batch that was stored at or after a time.

        Without one, return the offset after the last visible batch.
        """
        at = await provider.adapter.offset_at(queue, time_us)
        if sees_everything(principal):
            return at
        first, end = await self.bounds(principal, provider, queue)
        return await self._first(provider.adapter, principal, queue, Bounds(max(first, at), end))

    async def _first(self, adapter: QueueAdapter, principal: Principal, queue: int, span: Bounds) -> int:
        """Return the first visible offset in a range, or the end of the range.

        After `search_bytes` of other clients, stop and return the offset reached.
        """
        at, looked = span.first, 0
        if at >= span.next:
            return span.next
        receiver = await adapter.open_receiver(queue, at)
        try:
            while at < span.next and looked < self._search_bytes:
                batches, at, _ = await receiver.receive(PIECE_EVENTS, PIECE_BYTES)
                for batch in batches:
                    if batch.offset < span.next and _is_visible(principal, batch):
                        return batch.offset
                    looked += batch.nbytes
        except HeadraceError:  # damaged: a reader gets the error when it comes there
            return min(at, span.next)
        finally:
            await receiver.aclose()
        return min(at, span.next)

    async def _end(self, adapter: QueueAdapter, principal: Principal, queue: int, span: Bounds) -> int | None:
        """Return the offset after the last visible batch in a range; None without one."""
        high, looked = span.next, 0
        while high > span.first:
            low = max(span.first, (high - 1) // self._window * self._window)
            try:
                last, nbytes = await _last(adapter, principal, queue, Bounds(low, high))
            except HeadraceError:  # damaged, or removed meanwhile: no caller can read it
                return high
            if last is not None:
                return last + 1
            looked += nbytes
            if looked >= self._search_bytes and low > span.first:
                return low
            high = low if nbytes else await _before_hole(adapter, queue, Bounds(span.first, low))
        return None


async def selected_events(
    adapter: QueueAdapter, queue: int, start: int, selector: Selector, *, search_bytes: int = COUNT_BYTES
) -> int:
    """Count the events that a selector selects, from offset `start` to the end of a queue.

    After `search_bytes`, stop, and answer as if there was one more. Raises StorageError.
    """
    selects, found, looked, end = selector.matcher(), 0, 0, (await adapter.bounds(queue)).next
    receiver = await adapter.open_receiver(queue, min(start, end))
    try:
        while start < end:
            if looked >= search_bytes:
                return found + 1
            batches, start, _ = await receiver.receive(PIECE_EVENTS, PIECE_BYTES)
            looked += sum(batch.nbytes for batch in batches)
            found += sum(batch.count for batch in batches if batch.offset < end and selects(batch.stream))
    finally:
        await receiver.aclose()
    return found


async def _before_hole(adapter: QueueAdapter, queue: int, span: Bounds) -> int:
    """Return an offset from which on a range has no batch: its beginning, or less than a window after the last batch.

    After a restore, a queue leaves out billions of offsets: a search window by window would not end.
    """
    low, high = await _next_batch(adapter, queue, span), span.next
    if low == high:
        return span.first
    while high - low > WINDOW:
        middle = (low + high) // 2
        found = await _next_batch(adapter, queue, Bounds(middle, span.next))
        low, high = (low, middle) if found == span.next else (found, high)
    return high


async def _next_batch(adapter: QueueAdapter, queue: int, span: Bounds) -> int:
    """Return the offset of the first batch in a range; the end of the range without one."""
    at = span.first
    receiver = await adapter.open_receiver(queue, at)
    try:
        while at < span.next:
            batches, at, _ = await receiver.receive(1, 1)
            if batches:
                return min(batches[0].offset, span.next)
    finally:
        await receiver.aclose()
    return span.next


async def _last(adapter: QueueAdapter, principal: Principal, queue: int, span: Bounds) -> tuple[int | None, int]:
    """Return the last visible offset in a range, and the bytes of all batches in the range."""
    last, nbytes, at = None, 0, span.first
    receiver = await adapter.open_receiver(queue, at)
    try:
        while at < span.next:
            batches, at, _ = await receiver.receive(PIECE_EVENTS, PIECE_BYTES)
            for batch in batches:
                if batch.offset < span.next:
                    nbytes += batch.nbytes
                    last = batch.offset if _is_visible(principal, batch) else last
    finally:
        await receiver.aclose()
    return last, nbytes


def _is_visible(principal: Principal, batch: EventBatch) -> bool:
    return any(principal.allows(permission, batch.stream.namespace) for permission in _MAY_SEE)
