"""Administration of a remote provider: its subscriptions, dead letters and gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ..proto.v1 import subscriptions_pb2 as pb
from ..streams import wire
from ..streams.arguments import check_ids, check_instance, check_integer, check_text
from ..streams.errors import HeadraceError, NotFound
from ..streams.field_limits import MAX_ID
from ..streams.identity import StreamId
from ..streams.states import ConsumerState, QueueProgress, SubscriptionHold, SubscriptionState
from ..streams.subscriptions import DeadLetter, GapRecord, Start, SubscriptionDefinition, check_definition
from .transport import Transport

_MOST_LETTERS = 1000
_M = TypeVar("_M", bound=Message)


class ManagementClient:
    """Calls that manage subscriptions. Each call is retried during an outage, for at most `timeout_s` seconds."""

    def __init__(self, connection: Transport, provider: str, timeout_s: float) -> None:
        self._connection = connection
        self._provider = provider
        self._timeout_s = timeout_s

    @property
    def provider(self) -> str:
        """Name of the provider."""
        return self._provider

    @property
    def connection(self) -> Transport:
        """The transport that carries its calls."""
        return self._connection

    # ---- subscriptions -----------------------------------------------------------------------------------------------

    async def create_subscription(self, definition: SubscriptionDefinition) -> bool:
        """Create a durable subscription. Return False if an equal one exists; an attempt whose answer was lost may have
        created it.

        Its position is stored before this returns: every event published afterwards is kept for it. Raises
        DefinitionConflict if it exists with another definition.
        """
        check_definition(definition)
        message = wire.definition_message(definition)
        request = pb.CreateSubscriptionRequest(provider=self._provider, definition=message)
        return (await self._ask("CreateSubscription", request, pb.CreateSubscriptionResponse)).created

    async def generation_of(self, name: str) -> int | None:
        """The generation of a subscription in the control store; None if the silo does not tell it. Raises NotFound."""
        request = pb.GetSubscriptionRequest(provider=self._provider, name=name)
        found = (await self._ask("GetSubscription", request, pb.GetSubscriptionResponse)).subscription
        return found.generation if found.HasField("generation") else None

    async def subscription(self, name: str) -> SubscriptionState:
        """A subscription and its progress. Raises NotFound."""
        request = pb.GetSubscriptionRequest(provider=self._provider, name=check_text("name", name))
        found = (await self._ask("GetSubscription", request, pb.GetSubscriptionResponse)).subscription
        return SubscriptionState(
            wire.definition_of(found.definition),
            list(map(_progress, found.progress)),
            [
                ConsumerState(
                    one.id,
                    one.connected,
                    one.credit_events,
                    one.credit_bytes,
                    one.in_flight_events,
                    list(one.queues),
                    one.blocked,
                )
                for one in found.consumers
            ],
            found.dead_letters,
            found.gaps,
            SubscriptionHold(found.held.reason, found.held.since_us, found.held.resuming)
            if found.HasField("held")
            else None,
        )

    async def subscriptions(self) -> list[SubscriptionDefinition]:
        """All subscriptions that the client may see, ordered by name."""
        found: list[SubscriptionDefinition] = []
        while True:
            request = pb.ListSubscriptionsRequest(provider=self._provider, after_name=found[-1].name if found else "")
            more = (await self._ask("ListSubscriptions", request, pb.ListSubscriptionsResponse)).definitions
            if not more:
                return found
            found += map(wire.definition_of, more)

    async def delete_subscription(self, name: str) -> None:
        """Delete a subscription and its progress. Its dead letters stay, its consumers end. Raises NotFound."""
        request = pb.DeleteSubscriptionRequest(provider=self._provider, name=check_text("name", name))
        await self._ask("DeleteSubscription", request, pb.DeleteSubscriptionResponse, done=NotFound)

    async def seek(self, name: str, start: Start | str) -> int:
        """Move a subscription's position in all queues, also back. `start` may be text, as in `Start.parse`.

        With mode broadcast, move that of each consumer, but not of those with `keeps_positions`: to move one, start it
        again with other `positions`. Return the number of attached consumers that were not moved, as far as the asked
        silo knows.
        """
        to = wire.start_message(Start.of(start))
        request = pb.SeekSubscriptionRequest(provider=self._provider, name=check_text("name", name), to=to)
        return (await self._ask("SeekSubscription", request, pb.SeekSubscriptionResponse)).not_moved

    async def caught_up(self, name: str) -> None:
        """Return when the subscription has handled everything stored before the call, except in paused streams.

        There is no time limit. If the queues keep no order, as in Redis, return when no due event is left.
        """
        request = pb.AwaitCaughtUpRequest(provider=self._provider, name=check_text("name", name))
        method = "SubscriptionService/AwaitCaughtUp"
        await self._connection.long_call(method, request.SerializeToString(), outage_s=self._timeout_s)

    async def resume(self, name: str, stream: StreamId) -> bool:
        """Continue a stream that was paused after a failure. Return False if it is not paused."""
        check_text("name", name)
        check_instance("stream", stream, StreamId, "StreamId('orders', '42')")
        request = pb.ResumeStreamRequest(provider=self._provider, name=name, namespace=stream.namespace, key=stream.key)
        return (await self._ask("ResumeStream", request, pb.ResumeStreamResponse)).resumed

    # ---- dead letters and gaps ---------------------------------------------------------------------------------------

    async def dead_letters(
        self, subscription: str | None = None, *, limit: int = 100, after_id: int = 0
    ) -> list[DeadLetter]:
        """The first `limit` dead letters with an id above `after_id`, ordered by id. For the next page, pass the last
        id. None: the dead letters of all subscriptions that the client may manage."""
        if subscription is not None:
            check_text("subscription", subscription)
        check_integer("limit", limit)
        check_integer("after_id", after_id, -MAX_ID, MAX_ID)
        found: list[DeadLetter] = []
        while len(found) < limit:
            request = pb.ListDeadLettersRequest(
                provider=self._provider,
                subscription=subscription or "",
                limit=min(limit - len(found), _MOST_LETTERS),
                after_id=found[-1].id if found else max(after_id, 0),
            )
            more = (await self._ask("ListDeadLetters", request, pb.ListDeadLettersResponse)).dead_letters
            if not more:
                break
            found += [wire.dead_letter_of(letter, self._provider) for letter in more]
        return found

    async def redrive(self, subscription: str, ids: Sequence[int] | None = None) -> int:
        """Deliver dead letters (all, or those with `ids`) once more, outside of the order of their streams. Return the
        number of requested redrives. An event that fails again stays a dead letter, with its new reason."""
        check_text("subscription", subscription)
        if (ids := check_ids("ids", ids)) is not None and not (ids := _possible(ids)):
            return 0
        request = pb.RedriveDeadLettersRequest(provider=self._provider, subscription=subscription, ids=ids)
        return (await self._ask("RedriveDeadLetters", request, pb.RedriveDeadLettersResponse)).count

    async def delete_dead_letters(self, subscription: str, ids: Sequence[int] | None = None) -> int:
        """Delete dead letters of a subscription, also of a deleted one; without `ids`, all. Return their number."""
        check_text("subscription", subscription)
        if (ids := check_ids("ids", ids)) is not None and not (ids := _possible(ids)):
            return 0
        request = pb.DeleteDeadLettersRequest(
            provider=self._provider, subscription=subscription, ids=ids, all=ids is None
        )
        return (await self._ask("DeleteDeadLetters", request, pb.DeleteDeadLettersResponse)).count

    async def gaps(self, subscription: str) -> list[GapRecord]:
        """The gaps of a subscription, in the order in which they were found."""
        check_text("subscription", subscription)
        found: list[GapRecord] = []
        while True:
            request = pb.ListGapsRequest(provider=self._provider, subscription=subscription, skip=len(found))
            more = (await self._ask("ListGaps", request, pb.ListGapsResponse)).gaps
            if not more:
                return found
            found += [wire.gap_of(gap, self._provider, subscription) for gap in more]

    async def _ask(
        self, method: str, request: Message, response: type[_M], *, done: type[HeadraceError] | None = None
    ) -> _M:
        encoded = await self._connection.call(
            f"SubscriptionService/{method}", request.SerializeToString(), timeout_s=self._timeout_s, done=done
        )
        return parsed(response, encoded)


def _possible(ids: Sequence[int]) -> list[int]:
    """Return the ids that dead letters can have. If none is left, no request may be sent: an empty list would mean
    all."""
    return [number for number in ids if 0 < number <= MAX_ID]


def _progress(one: pb.QueueProgress) -> QueueProgress:
    return QueueProgress(
        queue=one.queue,
        next_offset=one.next_offset,
        watermark=one.watermark,
        end_offset=one.end_offset,
        streams_behind=one.streams_behind,
        streams_paused=one.streams_paused,
        paused={StreamId(each.stream.namespace, each.stream.key): each.reason for each in one.paused},
        fault=one.fault,
    )


def parsed(kind: type[_M], encoded: bytes) -> _M:
    """Decode an answer. Raises HeadraceError if the bytes are no such message."""
    try:
        return kind.FromString(encoded)
    except DecodeError:
        raise HeadraceError(f"the silo's answer is no {kind.DESCRIPTOR.name}") from None
