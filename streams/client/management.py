"""Subscriptions of a remote provider, what they gave up on, and what they do not get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ...proto.v1 import subscriptions_pb2 as pb
from .. import wire
from ..errors import HeadraceError, NotFound
from ..identity import StreamId
from ..states import ConsumerState, QueueProgress, SubscriptionState
from ..subscriptions import DeadLetter, GapRecord, Start, SubscriptionDefinition
from .connection import Connection

_MOST_LETTERS = 1000
_M = TypeVar("_M", bound=Message)


class Management:
    """What a client does with subscriptions. Every call waits and tries again over an outage, up to `timeout_s`."""

    def __init__(self, connection: Connection, provider: str, timeout_s: float) -> None:
        self._connection = connection
        self._provider = provider
        self._timeout_s = timeout_s

    @property
    def provider(self) -> str:
        """Name of the provider."""
        return self._provider

    @property
    def connection(self) -> Connection:
        """Where its calls go."""
        return self._connection

    # ---- subscriptions -----------------------------------------------------------------------------------------------

    async def create_subscription(self, definition: SubscriptionDefinition) -> bool:
        """Create a durable subscription. False where it exists, equal (also where an attempt whose answer was lost has
        just made it).

        Its position is pinned before this returns: every event published afterwards is kept for it. Raises
        DefinitionConflict where it exists with another definition.
        """
        message = wire.definition_message(definition)
        request = pb.CreateSubscriptionRequest(provider=self._provider, definition=message)
        return (await self._ask("CreateSubscription", request, pb.CreateSubscriptionResponse)).created

    async def subscription(self, name: str) -> SubscriptionState:
        """A subscription, and how far it is. Raises NotFound."""
        request = pb.GetSubscriptionRequest(provider=self._provider, name=name)
        found = (await self._ask("GetSubscription", request, pb.GetSubscriptionResponse)).subscription
        return SubscriptionState(
            wire.definition_of(found.definition),
            list(map(_progress, found.progress)),
            [
                ConsumerState(
                    one.id, one.connected, one.credit_events, one.credit_bytes, one.in_flight_events, list(one.queues)
                )
                for one in found.consumers
            ],
            found.dead_letters,
            found.gaps,
        )

    async def subscriptions(self) -> list[SubscriptionDefinition]:
        """All that the client may see, by name."""
        found: list[SubscriptionDefinition] = []
        while True:
            request = pb.ListSubscriptionsRequest(provider=self._provider, after_name=found[-1].name if found else "")
            more = (await self._ask("ListSubscriptions", request, pb.ListSubscriptionsResponse)).definitions
            if not more:
                return found
            found += map(wire.definition_of, more)

    async def delete_subscription(self, name: str) -> None:
        """Delete a subscription and its progress; its dead letters stay. Its consumers are told. Raises NotFound."""
        request = pb.DeleteSubscriptionRequest(provider=self._provider, name=name)
        await self._ask("DeleteSubscription", request, pb.DeleteSubscriptionResponse, done=NotFound)

    async def seek(self, name: str, start: Start | str) -> None:
        """Move a subscription's position, also back, in all its queues. `start` may be text, as in `Start.parse`."""
        to = wire.start_message(Start.parse(start) if isinstance(start, str) else start)
        request = pb.SeekSubscriptionRequest(provider=self._provider, name=name, to=to)
        await self._ask("SeekSubscription", request, pb.SeekSubscriptionResponse)

    async def caught_up(self, name: str) -> None:
        """Return when everything stored before the call is done for the subscription (paused streams apart), however
        long that takes. Where the queues keep no order, as in Redis: when nothing is left that is due."""
        request = pb.AwaitCaughtUpRequest(provider=self._provider, name=name)
        method = "SubscriptionService/AwaitCaughtUp"
        await self._connection.long_call(method, request.SerializeToString(), outage_s=self._timeout_s)

    async def resume(self, name: str, stream: StreamId) -> bool:
        """Go on with a stream that was paused after a failure. False where it is not paused."""
        request = pb.ResumeStreamRequest(provider=self._provider, name=name, namespace=stream.namespace, key=stream.key)
        return (await self._ask("ResumeStream", request, pb.ResumeStreamResponse)).resumed

    # ---- dead letters and gaps ---------------------------------------------------------------------------------------

    async def dead_letters(
        self, subscription: str | None = None, *, limit: int = 100, after_id: int = 0
    ) -> list[DeadLetter]:
        """The first `limit` dead letters with an id above `after_id`, by id: go on from the last one's. Of one
        subscription, or of all that the client may manage."""
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
        """Deliver dead letters (all, or those with `ids`) once more, out of line. Returns how many were asked for; what
        fails again stays a dead letter with its new reason."""
        if ids is not None and not (ids := _possible(ids)):
            return 0
        request = pb.RedriveDeadLettersRequest(provider=self._provider, subscription=subscription, ids=ids)
        return (await self._ask("RedriveDeadLetters", request, pb.RedriveDeadLettersResponse)).count

    async def delete_dead_letters(self, subscription: str, ids: Sequence[int] | None = None) -> int:
        """Delete dead letters of a subscription, which may be gone itself; None deletes all. Returns how many."""
        if ids is not None and not (ids := _possible(ids)):
            return 0
        request = pb.DeleteDeadLettersRequest(
            provider=self._provider, subscription=subscription, ids=ids, all=ids is None
        )
        return (await self._ask("DeleteDeadLetters", request, pb.DeleteDeadLettersResponse)).count

    async def gaps(self, subscription: str) -> list[GapRecord]:
        """What a subscription does not get, in the order in which it was noticed."""
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
    """Those that a dead letter may have. To ask for none would be to ask for all."""
    return [number for number in ids if 0 < number < 1 << 63]


def _progress(one: pb.QueueProgress) -> QueueProgress:
    return QueueProgress(
        queue=one.queue,
        next_offset=one.next_offset,
        watermark=one.watermark,
        end_offset=one.end_offset,
        streams_behind=one.streams_behind,
        streams_paused=one.streams_paused,
        paused={StreamId(each.stream.namespace, each.stream.key): each.reason for each in one.paused},
    )


def parsed(kind: type[_M], encoded: bytes) -> _M:
    """An answer, decoded. Raises HeadraceError where the bytes are none."""
    try:
        return kind.FromString(encoded)
    except DecodeError:
        raise HeadraceError(f"the silo answered with what is no {kind.DESCRIPTOR.name}") from None
