"""The redis adapter: queues with delays and priorities, in one Redis, in a cluster, or in several servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ...streams.background import BackgroundTasks
from ...streams.errors import Closed, HeadraceError, InvalidArgument, NotSupported, StorageError
from ...streams.events import EventBatch, ScheduledBatch
from ...streams.identity import SequenceToken
from ..receiving import Bounds, QueueReceiver
from ..registry import read_options
from ..seam import AdapterContext, Backlog, Capabilities, ProducerSequence, QueueAdapter, QueueStatistics, Receipt
from .backlog import COUNTED, UnfinishedBatches, backlog_of, due_end_of, unfinished
from .keys import ShardKeys, check_name, provider_key, ranked
from .limits import REDIS_LIMITS, RedisLimits
from .location import location_of, with_location
from .options import RedisOptions
from .owned import OwnedConnection, QueuesOwner
from .producers import KEPT_S, RedisProducers, hashed_name, push_with_retries
from .pusher import ShardPusher
from .receiver import RedisReceiver, body_of
from .server import ServerAway
from .shard import PushedEvent, RedisShard
from .watch import watched


class RedisAdapter(QueueAdapter):
    """Queues in Redis. A batch waits until it is due. Of the due batches, the highest priority is received first.

    A queue has one reader at a time. A batch gets its offset when the reader takes it; the token of its receipt is
    lower.
    """

    capabilities = Capabilities(durable=True, delay=True, priority=True, idempotent=True, ordered=False)

    def __init__(self, context: AdapterContext, options: RedisOptions, limits: RedisLimits = REDIS_LIMITS) -> None:
        self._limits = limits
        self._provider = check_name("provider", context.provider)
        owner = QueuesOwner(provider_key(options.prefix, self._provider), self._provider, context.owner, context.queues)
        chosen = options.servers()
        order = sorted(range(len(chosen)), key=lambda index: chosen[index].zone != options.zone)
        self._servers = [OwnedConnection(shard.url, owner, cluster=shard.cluster, limits=limits) for shard in chosen]
        self.location = location_of(options)
        wait, timeout_s = options.when_unavailable == "wait", options.publish_timeout_s
        self._queues = [
            _Queue(
                {
                    chosen[index].name: RedisShard(
                        self._servers[index],
                        ShardKeys.of(options.prefix, f"{self._provider}.{queue}", chosen[index].name),
                        name=f"{self._provider}/{queue}/{chosen[index].name}",
                    )
                    for index in order
                },
                wait=wait,
                timeout_s=timeout_s,
            )
            for queue in range(context.queues)
        ]
        named = {shard.name: server for shard, server in zip(chosen, self._servers, strict=True)}
        self._producers = RedisProducers(named, options.prefix, self._provider, limits)
        self._storing = BackgroundTasks()
        self._receivers: set[RedisReceiver] = set()
        self._closed = False

    async def open(self) -> None:
        """Check the servers. Raises StorageError if none answers, InvalidArgument if one cannot be used."""
        outcomes = await asyncio.gather(*(server.open() for server in self._servers), return_exceptions=True)
        errors = [error for error in outcomes if isinstance(error, BaseException)]
        fatal = [error for error in errors if not isinstance(error, ServerAway)]
        if fatal or len(errors) == len(self._servers):
            raise (fatal or errors)[0]

    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        """See QueueAdapter. All batches of a call for one queue are stored, or none of them.

        While the server is away, the call waits or fails, by the options. StorageError says if it may be stored.
        """
        self._check_open()
        if sequence is not None:
            return self._enqueue_once(batches, sequence)
        by_queue: dict[int, list[int]] = {}
        for index, (queue, _) in enumerate(batches):
            self._queue(queue)
            by_queue.setdefault(queue, []).append(index)
        call = _PendingEnqueue(len(batches), len(by_queue))
        for queue, indexes in by_queue.items():
            events = [pushed(batches[index][1]) for index in indexes]
            self._queues[queue].push(events, call, indexes)
        return call.answer

    def _enqueue_once(
        self, batches: Sequence[tuple[int, EventBatch]], sequence: ProducerSequence
    ) -> Awaitable[Sequence[Receipt]]:
        placed = [(self._queue(queue), pushed(batch)) for queue, batch in batches]
        task = self._storing.hold(self._once(sequence, placed), f"headrace push of {sequence.producer}")
        return asyncio.shield(task)  # a call that has begun is completed, even if the caller is cancelled

    async def _once(
        self, sequence: ProducerSequence, placed: Sequence[tuple[_Queue, PushedEvent]]
    ) -> Sequence[Receipt]:
        receipts = await self._producers.once(sequence, len(placed), lambda: self._store_once(sequence, placed))
        # In the background: if it fails, the shard only remembers the call longer.
        for queue in {queue for queue, _ in placed}:
            self._storing.start(queue.settle(sequence), f"headrace settling of {sequence.producer}")
        return receipts

    async def _store_once(
        self, sequence: ProducerSequence, placed: Sequence[tuple[_Queue, PushedEvent]]
    ) -> Sequence[int | None]:
        by_queue: dict[_Queue, list[int]] = {}
        for index, (queue, _) in enumerate(placed):
            by_queue.setdefault(queue, []).append(index)
        positions: list[int | None] = [None] * len(placed)

        async def store(queue: _Queue, indexes: Sequence[int]) -> None:
            stored = await queue.push_once([placed[index][1] for index in indexes], sequence)
            for index, position in zip(indexes, stored, strict=False):  # no positions if a later call is stored already
                positions[index] = position

        outcomes = await asyncio.gather(*(store(*each) for each in by_queue.items()), return_exceptions=True)
        for error in outcomes:
            if error is not None:
                raise error
        return positions

    async def open_receiver(self, queue: int, start: int | None = None) -> QueueReceiver:
        """Become the reader of a queue. The former reader raises StorageError from then on."""
        if start is not None:
            raise self._not_rewindable()
        receiver = RedisReceiver(queue, self._queue(queue).watches, self._limits)
        for server in self._servers:
            server.check_again()
        try:
            await receiver.open()
        except BaseException:
            await receiver.aclose()
            raise
        self._receivers = {each for each in self._receivers if not each.closed} | {receiver}
        return receiver

    def shards(self, queue: int) -> Sequence[RedisShard]:
        """Return the shards of a queue, those of this zone first, to inspect it or to change single events."""
        return self._queue(queue).shards

    async def bounds(self, queue: int) -> Bounds:
        return await self._queue(queue).bounds()

    async def resume_at(self, queue: int, offset: int) -> int:
        """See QueueAdapter. While a shard is away, this is `offset`, because that shard may have the queue's end."""
        return await self._queue(queue).resume_at(offset)

    async def statistics(self, queue: int) -> QueueStatistics:
        return QueueStatistics(await self.bounds(queue))

    async def backlog(self, queue: int, offset: int) -> Backlog:
        return await self._queue(queue).backlog(offset)

    async def due_end(self, queue: int) -> int | None:
        return await self._queue(queue).due_end()

    async def offset_at(self, queue: int, time_us: int) -> int:
        raise self._not_rewindable()

    async def last_sequence(self, producer: str) -> int:
        self._check_open()
        return await self._producers.last(producer)

    async def aclose(self) -> None:
        self._closed = True
        await self._storing.join()
        await asyncio.gather(*(receiver.aclose() for receiver in self._receivers))
        await asyncio.gather(*(queue.aclose() for queue in self._queues))
        await asyncio.gather(*(server.aclose() for server in self._servers))

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"provider {self._provider!r}: the redis adapter is closed")

    def _queue(self, index: int) -> _Queue:
        self._check_open()
        if not 0 <= index < len(self._queues):
            raise InvalidArgument(
                f"provider {self._provider!r} has no queue {index}: they are numbered 0 to {len(self._queues) - 1}"
            )
        return self._queues[index]

    def _not_rewindable(self) -> NotSupported:
        return NotSupported(
            f"provider {self._provider!r}: the redis adapter is not rewindable, because it deletes acknowledged "
            "events; use the log adapter to start at a position or a time"
        )


class _Queue:
    """One queue, over its shards."""

    def __init__(self, shards: Mapping[str, RedisShard], *, wait: bool, timeout_s: float) -> None:
        """`shards` are the parts of the queue, by the names of their servers."""
        self._by_server = shards
        self.shards = list(shards.values())
        self.watches = watched(self.shards)
        self._pushers = [ShardPusher(watch, wait=wait, timeout_s=timeout_s) for watch in self.watches]
        for pusher in self._pushers:
            pusher.share_with(self._pushers)
        self._turn = 0
        self._wait = wait
        self._timeout_s = timeout_s

    def push(self, events: Sequence[PushedEvent], call: _PendingEnqueue, indexes: Sequence[int]) -> None:
        self._pusher().push(events, lambda outcome: call.note_outcome(indexes, outcome))

    async def push_once(self, events: Sequence[PushedEvent], sequence: ProducerSequence) -> Sequence[int | None]:
        """Store events in the producer's shard, also when the call is repeated."""
        shard, producer = self._home(sequence), hashed_name(sequence.producer)
        return await push_with_retries(
            lambda: shard.push(events, pusher=producer, number=sequence.number, remembered_s=KEPT_S),
            wait=self._wait,
            timeout_s=self._timeout_s,
        )

    async def settle(self, sequence: ProducerSequence) -> None:
        """Let the shard forget the call early, because the ledger has recorded it as stored."""
        with suppress(StorageError):
            await self._home(sequence).settle(hashed_name(sequence.producer), sequence.number)

    def _home(self, sequence: ProducerSequence) -> RedisShard:
        """Return the shard at the server with the producer's ledger: another server that is away does not matter."""
        return self._by_server[ranked(self._by_server, sequence.producer)[0]]

    def _pusher(self) -> ShardPusher:
        """Return the next pusher in turn whose server is not away."""
        for _ in self._pushers:
            self._turn = (self._turn + 1) % len(self._pushers)
            if not self._pushers[self._turn].away:
                break
        return self._pushers[self._turn]

    async def bounds(self) -> Bounds:
        """Return the bounds of the shards that answer. Later positions are never below `next`, whatever the servers'
        clocks show."""
        answers = await self._bounds(0)
        following = max(following for _, following in answers)
        if any(mine < following for _, mine in answers):
            answers += await self._bounds(following)
        return Bounds(max(done for done, _ in answers), max(following for _, following in answers))

    async def resume_at(self, offset: int) -> int:
        answers = await self._bounds(0)
        if len(answers) == len(self.shards):
            offset = min(offset, max(following for _, following in answers))
        await self._bounds(offset)
        return offset

    async def _bounds(self, floor: int) -> list[tuple[int, int]]:
        return await self._answers([watch.ask(partial(watch.shard.bounds, floor)) for watch in self.watches])

    async def backlog(self, offset: int) -> Backlog:
        return backlog_of(await self._unfinished(offset, COUNTED))

    async def due_end(self) -> int | None:
        return due_end_of(await self._unfinished(0, 0))

    async def _unfinished(self, offset: int, counted: int) -> list[UnfinishedBatches]:
        return await self._answers(
            [watch.ask(partial(unfinished, watch.shard, offset, counted)) for watch in self.watches]
        )

    async def _answers(self, asked: Sequence[Awaitable[Any]]) -> list[Any]:
        """Return the answers of all servers that are not away. Raises StorageError if all are away."""
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        errors = [error for error in outcomes if isinstance(error, BaseException)]
        fatal = [error for error in errors if not isinstance(error, ServerAway)]
        if fatal or len(errors) == len(outcomes):
            raise (fatal or errors)[0]
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def aclose(self) -> None:
        await asyncio.gather(*(pusher.aclose() for pusher in self._pushers))
        await asyncio.gather(*(watch.aclose() for watch in self.watches))


class _PendingEnqueue:
    """A call of `enqueue`. Its answer is set when all its queues have answered."""

    def __init__(self, batches: int, parts: int) -> None:
        self.answer: asyncio.Future[Sequence[Receipt]] = asyncio.get_running_loop().create_future()
        self._receipts = [Receipt(None)] * batches
        self._parts = parts
        if not parts:
            self.answer.set_result([])

    def note_outcome(self, indexes: Sequence[int], outcome: Sequence[int] | HeadraceError) -> None:
        """Note the positions of some batches, or their error."""
        if isinstance(outcome, HeadraceError):
            if not self.answer.done():
                self.answer.set_exception(outcome)
            return
        for index, position in zip(indexes, outcome, strict=True):
            self._receipts[index] = Receipt(SequenceToken(position))
        self._parts -= 1
        if not self._parts and not self.answer.done():
            self.answer.set_result(self._receipts)


def pushed(batch: EventBatch) -> PushedEvent:
    """Return a batch as a shard stores it."""
    if isinstance(batch, ScheduledBatch):
        return PushedEvent(body_of(batch), delay_s=batch.delay_us / 1e6, priority=batch.priority)
    return PushedEvent(body_of(batch))


async def open_adapter(
    context: AdapterContext, options: Mapping[str, Any], limits: RedisLimits = REDIS_LIMITS
) -> RedisAdapter:
    """Open the adapter `redis`. Raises InvalidArgument for wrong options, StorageError without a server."""
    located = with_location(context.provider, options, context.location)
    adapter = RedisAdapter(context, read_options("redis", RedisOptions, located), limits)
    try:
        await adapter.open()
    except BaseException:
        await adapter.aclose()
        raise
    return adapter
