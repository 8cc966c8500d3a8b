"""A provider that records what happens, and the assertions about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..agents import DeliveryService, HandlerService
from ..silo.opening import ProviderParts
from ..silo.provider import Provider
from ..streams.codecs import Publishable
from ..streams.errors import InvalidArgument
from ..streams.events import Event
from ..streams.handlers import SubscriptionDeclaration
from ..streams.identity import StreamId
from ..streams.publishing import listed
from ..streams.subscriptions import Checkpoint, DeadLetter, SubscriptionDefinition
from .deliveries import DeliveryHistory, RecordedDelivery, shown
from .faults import HandlerFaults
from .mirrored_store import MirroredStore


class RecordedProvider(Provider):
    """Records publishes and deliveries."""

    store: MirroredStore

    def __init__(self, parts: ProviderParts, history: DeliveryHistory) -> None:
        super().__init__(parts)
        self._history = history
        self._handlers = HandlerFaults(history)
        self._restarts_at: dict[str, Mapping[int, Checkpoint]] = {}
        """By subscription, the positions to which `redeliver` goes back."""

    async def make_service(self, declared: SubscriptionDeclaration) -> HandlerService:
        service = await super().make_service(declared)
        service.watch = self._handlers.watched
        return service

    async def serve(
        self,
        definition: SubscriptionDefinition,
        service: DeliveryService,
        start: Mapping[int, Checkpoint] | None = None,
        *,
        stands_by: bool = False,
        creates: bool = True,
    ) -> None:
        await super().serve(definition, service, start, stands_by=stands_by, creates=creates)
        self._restarts_at[definition.name] = dict(self.manager.subscriptions.serving(definition.name).saved)

    def deliveries(self, subscription: str, stream: StreamId | str | None = None) -> list[RecordedDelivery]:
        """Return the deliveries to a subscription in their order, of one stream or of all. Raises InvalidArgument if
        nothing of this name was subscribed in the test."""
        self._check_served(subscription)
        return self._history.of(subscription, _stream(stream))

    def history(self, stream: StreamId | str | None = None) -> str:
        """Return what happened, a line for each published event, delivery and dead letter; of one stream, or of all."""
        return self._history.text(self.store.letters, _stream(stream))

    def assert_delivered(
        self, subscription: str, stream: StreamId | str, payloads: Publishable | Iterable[Publishable]
    ) -> None:
        """Check that a subscription handled exactly these events of a stream, in this order, each at least once."""
        __tracebackhide__ = True
        found = list[bytes]()
        tokens = set[object]()
        for each in self.deliveries(subscription, stream):
            if each.is_handled and each.event.token not in tokens:
                tokens.add(each.event.token)
                found.append(each.event.payload)
        expected = [
            item.payload if isinstance(item, Event) else item for item in listed(_one(stream), payloads, self.codecs)
        ]
        if found != expected:
            self._fail(f"{subscription} handled other events of {stream}", _listed(expected), _listed(found), stream)

    def assert_failed_deliveries(self, subscription: str, stream: StreamId | str, times: int) -> None:
        """Check how many deliveries of a stream's events failed, with those before a dead letter."""
        __tracebackhide__ = True
        errors = [each.error for each in self.deliveries(subscription, stream)]
        failed = sum(isinstance(error, Exception) for error in errors)  # `redeliver` cancels those that run
        if failed != times:
            self._fail(
                f"another number of deliveries of {stream} to {subscription} failed", str(times), str(failed), stream
            )

    def assert_dead_letter(
        self,
        subscription: str,
        stream: StreamId | str,
        payload: Publishable | None = None,
        *,
        reason: str = "",
        attempts: int | None = None,
    ) -> DeadLetter:
        """Check that a subscription has exactly one dead letter of a stream, and return it. `reason` is a part of its
        reason. What is not given is not checked."""
        __tracebackhide__ = True
        self.deliveries(subscription)
        found = [
            letter
            for letter in self.store.letters
            if (letter.subscription, letter.stream) == (subscription, _one(stream))
        ]
        expected = list[str]()
        matching = found
        if payload is not None:
            [item] = listed(_one(stream), payload, self.codecs)
            wanted = item.payload if isinstance(item, Event) else item
            expected.append(f"payload {shown(wanted)}")
            matching = [letter for letter in matching if letter.payload == wanted]
        if reason:
            expected.append(f"a reason with {reason!r}")
            matching = [letter for letter in matching if reason in letter.reason]
        if attempts is not None:
            expected.append(f"{attempts} attempts")
            matching = [letter for letter in matching if letter.attempts == attempts]
        if len(matching) != 1:
            what = f"one dead letter{' with ' if expected else ''}{', '.join(expected)}"
            is_there = [f"{shown(each.payload)}, {each.attempts} attempts: {each.reason}" for each in found]
            self._fail(
                f"{subscription} has no such dead letter of {stream}", what, "; ".join(is_there) or "none", stream
            )
        return matching[0]

    def assert_nothing_lost(self) -> None:
        """Check that there are no dead letters, gap records, paused streams or unfinished deliveries."""
        __tracebackhide__ = True
        found = [f"a dead letter of {each.subscription} in {each.stream}" for each in self.store.letters]
        found += [f"a gap of {each.subscription}: {each.reason}" for each in self.store.gap_records]
        for name, served in self.manager.served.items():
            for delivery in served.deliveries.values():
                statistics = delivery.statistics()
                states = {"paused": statistics.paused, "waiting for a retry": statistics.waiting}
                found += [f"{count} streams of {name} {state}" for state, count in states.items() if count]
        running = [each for each in self._history.deliveries if each.is_running]
        found += [f"a handler of {each.subscription} that runs on {each.event.stream}" for each in running]
        if found:
            self._fail("events were lost or are unfinished", "none", "; ".join(found), None)

    def _check_served(self, subscription: str) -> None:
        if subscription not in self._restarts_at:
            known = ", ".join(sorted(self._restarts_at)) or "none"
            raise InvalidArgument(f"no subscription {subscription!r} was served in this test; served were: {known}")

    def _fail(self, problem: str, expected: str, found: str, stream: StreamId | str | None) -> None:
        __tracebackhide__ = True
        raise AssertionError(
            self._with_history(f"{problem}\n  expected: {expected}\n  found:    {found}", stream)
        ) from None

    def _with_history(self, problem: str, stream: StreamId | str | None = None) -> str:
        return f"{problem}\nHistory{'' if stream is None else f' of {stream}'}:\n{self.history(stream)}"


def _stream(stream: StreamId | str | None) -> StreamId | None:
    return None if stream is None else _one(stream)


def _one(stream: StreamId | str) -> StreamId:
    return StreamId.parse(stream) if isinstance(stream, str) else stream


def _listed(payloads: Sequence[bytes]) -> str:
    return f"[{', '.join(map(shown, payloads))}]"
