"""The conformance suite fails on adapters with a fault each: all that it tests can go wrong, and it sees it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from headrace import EventBatch, InvalidArgument, SequenceToken
from headrace.adapters import (
    AdapterContext,
    Bounds,
    Capabilities,
    ProducerSequence,
    QueueAdapter,
    QueueReceiver,
    Receipt,
    Received,
    open_adapter,
)
from headrace.adapters.conformance import (
    AdapterConformance,
    ConformsToDurable,
    ConformsToIdempotent,
    ConformsToQueueAdapter,
    ConformsToReadOnly,
    ConformsToRewindable,
)
from headrace.adapters.conformance.harness import deadline_s
from headrace.adapters.forwarding import ForwardingAdapter
from headrace.adapters.receiving import Accept


class Receiver(QueueReceiver):
    """Passes everything on. Faults override one method."""

    def __init__(self, inner: QueueReceiver) -> None:
        self.inner = inner

    async def receive(self, max_events: int, max_bytes: int) -> Received:
        return await self.inner.receive(max_events, max_bytes)

    async def acknowledge(self, offset: int) -> None:
        await self.inner.acknowledge(offset)

    async def aclose(self) -> None:
        await self.inner.aclose()


class Adapter(ForwardingAdapter):
    """Passes everything on. Faults override one method, or name a faulty receiver."""

    receiver: type[Receiver] = Receiver

    async def open_receiver(self, queue: int, start: int | None = None) -> QueueReceiver:
        return self.receiver(await self.inner.open_receiver(queue, start))


# ---- faulty receivers ----------------------------------------------------------------------------------------------


class LosesWhenCancelled(Receiver):
    async def receive(self, max_events: int, max_bytes: int) -> Received:
        received = await super().receive(max_events, max_bytes)
        for _ in range(5):
            await asyncio.sleep(0)
        return received


class IgnoresTheLimits(Receiver):
    async def receive(self, max_events: int, max_bytes: int) -> Received:
        return await super().receive(1 << 30, 1 << 30)


class ReturnsNothingInsteadOfWaiting(Receiver):
    async def receive(self, max_events: int, max_bytes: int) -> Received:
        receiving = asyncio.ensure_future(super().receive(max_events, max_bytes))
        for _ in range(5):
            await asyncio.sleep(0)
        if receiving.done():
            return receiving.result()
        receiving.cancel()
        return Received([], 0)


class HandsOutTheSameObjects(Receiver):
    known: dict[tuple[str, int], EventBatch]

    async def receive(self, max_events: int, max_bytes: int) -> Received:
        received = await super().receive(max_events, max_bytes)
        same = [self.known.setdefault((batch.encoded.hex(), batch.offset), batch) for batch in received.batches]
        return received._replace(batches=same)


class Offers(Receiver):
    accept: Accept | None = None

    def offer_to(self, accept: Accept) -> None:
        self.accept = accept


class ReturnsWhatWasAccepted(Offers):
    async def receive(self, max_events: int, max_bytes: int) -> Received:
        received = await super().receive(max_events, max_bytes)
        if self.accept is not None:
            self.accept(received.batches)
        return received


class LosesWhatIsRefused(Offers):
    async def receive(self, max_events: int, max_bytes: int) -> Received:
        received = await super().receive(max_events, max_bytes)
        if self.accept is None:
            return received
        self.accept(received.batches)
        return Received((), received.next_offset)


class OffersTheLastOnly(Offers):
    async def receive(self, max_events: int, max_bytes: int) -> Received:
        received = await super().receive(max_events, max_bytes)
        if self.accept is not None and self.accept(received.batches[-1:]):
            return Received((), received.next_offset)
        return received


class OffersLater(Offers):
    async def receive(self, max_events: int, max_bytes: int) -> Received:
        received = await super().receive(max_events, max_bytes)
        if self.accept is not None:
            asyncio.get_running_loop().call_soon(self.accept, received.batches)
            return Received((), received.next_offset)
        return received


class NumbersBackwards(Receiver):
    async def receive(self, max_events: int, max_bytes: int) -> Received:
        received = await super().receive(max_events, max_bytes)
        for batch in received.batches:
            batch.offset = 1000 - batch.offset
        return received


class PointsBehindItself(Receiver):
    async def receive(self, max_events: int, max_bytes: int) -> Received:
        received = await super().receive(max_events, max_bytes)
        return received._replace(next_offset=received.batches[-1].offset)


class AcknowledgesOneTooMany(Receiver):
    async def acknowledge(self, offset: int) -> None:
        await super().acknowledge(offset + 1)


class NeverAcknowledges(Receiver):
    async def acknowledge(self, offset: int) -> None:
        pass


class AcknowledgesAsItReads(Receiver):
    async def receive(self, max_events: int, max_bytes: int) -> Received:
        received = await super().receive(max_events, max_bytes)
        await self.acknowledge(received.next_offset)
        return received


class ClosesInSilence(Receiver):
    async def aclose(self) -> None:
        pass


# ---- faulty adapters -----------------------------------------------------------------------------------------------


def with_receiver(receiver: type[Receiver]) -> type[Adapter]:
    return type(receiver.__name__, (Adapter,), {"receiver": receiver})


class StoresBackwards(Adapter):
    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        return super().enqueue(batches[::-1], sequence=sequence)


class OvertakesWhenNotAwaited(Adapter):
    turn = 0

    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        async def later(pause: int) -> Sequence[Receipt]:
            for _ in range(pause):
                await asyncio.sleep(0)
            return await self.inner.enqueue(tuple(batches), sequence=sequence)

        self.turn += 1
        return asyncio.ensure_future(later(self.turn % 3))


class LosesTheHeaders(Adapter):
    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        bare = [(queue, EventBatch.of(batch.stream, batch.payloads())) for queue, batch in batches]
        return super().enqueue(bare, sequence=sequence)


class WritesToTheBatch(Adapter):
    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        for number, (_, batch) in enumerate(batches):
            batch.offset = number
        return super().enqueue(batches, sequence=sequence)


class PromisesOtherTokens(Adapter):
    async def _off_by_one(self, stored: Awaitable[Sequence[Receipt]]) -> Sequence[Receipt]:
        return [Receipt(SequenceToken(receipt.token.offset + 1)) for receipt in await stored if receipt.token]

    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        return self._off_by_one(super().enqueue(batches, sequence=sequence))


class StoresPartOfABadCall(Adapter):
    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        try:
            return super().enqueue(batches, sequence=sequence)
        except InvalidArgument:
            super().enqueue(batches[:1], sequence=sequence)
            raise


class StoresDuplicates(Adapter):
    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        return super().enqueue(batches)


class KnowsOneProducerOnly(Adapter):
    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        return super().enqueue(batches, sequence=sequence and sequence._replace(producer="p"))


class AcceptsHoles(Adapter):
    last = 0

    def enqueue(
        self, batches: Sequence[tuple[int, EventBatch]], *, sequence: ProducerSequence | None = None
    ) -> Awaitable[Sequence[Receipt]]:
        if sequence is not None and sequence.number > self.last:
            sequence, self.last = sequence._replace(previous=self.last), sequence.number
        return super().enqueue(batches, sequence=sequence)


class CountsQueuesFromTheEnd(Adapter):
    async def open_receiver(self, queue: int, start: int | None = None) -> QueueReceiver:
        return await super().open_receiver(queue % 2, start)


class HasFixedBounds(Adapter):
    async def bounds(self, queue: int) -> Bounds:
        return Bounds(0, 1)


class ClosesNothing(Adapter):
    async def aclose(self) -> None:
        pass


class ForgetsTheStart(Adapter):
    async def open_receiver(self, queue: int, start: int | None = None) -> QueueReceiver:
        return await super().open_receiver(queue)


class StartsAboveTheEnd(Adapter):
    async def open_receiver(self, queue: int, start: int | None = None) -> QueueReceiver:
        end = (await self.bounds(queue)).next
        return await super().open_receiver(queue, None if start is None else min(start, end))


class FindsTimesOneTooLate(Adapter):
    async def offset_at(self, queue: int, time_us: int) -> int:
        return min(await super().offset_at(queue, time_us) + 1, (await self.bounds(queue)).next)


class FindsOnlyLaterTimes(Adapter):
    async def offset_at(self, queue: int, time_us: int) -> int:
        return await super().offset_at(queue, time_us + 1)


class ReachesOneTooFar(Adapter):
    async def end_within(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        return min(await super().end_within(queue, start, end, max_events, max_bytes) + 1, end)


class ReachesPastTheEnd(Adapter):
    async def end_within(self, queue: int, start: int, end: int, max_events: int | None, max_bytes: int | None) -> int:
        return end if max_events is None else await super().end_within(queue, start, end, max_events, max_bytes)


class DeclaresNothing(Adapter):
    def __init__(self, inner: QueueAdapter) -> None:
        super().__init__(inner)
        self.capabilities = Capabilities()


FINDS: list[tuple[type[Adapter], str]] = [
    (with_receiver(LosesWhenCancelled), "test_cancelled_receives_lose_nothing"),
    (with_receiver(LosesWhenCancelled), "test_a_receive_cancelled_while_data_comes_loses_nothing"),
    (with_receiver(IgnoresTheLimits), "test_receiving_with_limits_brings_the_same"),
    (with_receiver(IgnoresTheLimits), "test_a_batch_above_the_limit_is_received_alone"),
    (with_receiver(ReturnsNothingInsteadOfWaiting), "test_a_waiting_receive_is_woken_by_an_enqueue"),
    (with_receiver(HandsOutTheSameObjects), "test_batches_received_twice_are_different_objects"),
    (with_receiver(NumbersBackwards), "test_offsets_strictly_increase_within_the_bounds"),
    (with_receiver(PointsBehindItself), "test_next_offset_is_where_the_receiver_goes_on"),
    (with_receiver(AcknowledgesOneTooMany), "test_acknowledged_batches_do_not_come_again"),
    (with_receiver(AcknowledgesOneTooMany), "test_random_steps_match_a_list"),
    (with_receiver(NeverAcknowledges), "test_acknowledging_everything_leaves_nothing"),
    (with_receiver(NeverAcknowledges), "test_acknowledging_never_moves_backwards"),
    (with_receiver(AcknowledgesAsItReads), "test_unacknowledged_batches_come_again_from_the_next_receiver"),
    (with_receiver(AcknowledgesAsItReads), "test_a_second_receiver_gets_everything_not_acknowledged_too"),
    (with_receiver(ClosesInSilence), "test_closing_a_receiver_wakes_its_waiting_receive"),
    (with_receiver(ClosesInSilence), "test_a_closed_receiver_is_refused_and_the_adapter_goes_on"),
    (with_receiver(ReturnsWhatWasAccepted), "test_offered_and_received_batches_are_all_of_them_once_and_in_order"),
    (with_receiver(LosesWhatIsRefused), "test_offered_and_received_batches_are_all_of_them_once_and_in_order"),
    (with_receiver(OffersTheLastOnly), "test_offered_and_received_batches_are_all_of_them_once_and_in_order"),
    (with_receiver(OffersLater), "test_offered_and_received_batches_are_all_of_them_once_and_in_order"),
    (StoresBackwards, "test_enqueued_batches_are_received_unchanged"),
    (StoresBackwards, "test_receipts_come_in_the_order_of_the_call_for_any_queues"),
    (OvertakesWhenNotAwaited, "test_calls_are_stored_in_order_without_awaiting_in_between"),
    (OvertakesWhenNotAwaited, "test_the_list_of_a_call_belongs_to_the_caller"),
    (LosesTheHeaders, "test_enqueued_batches_are_received_unchanged"),
    (WritesToTheBatch, "test_a_batch_can_be_enqueued_again_and_stays_as_it_was"),
    (PromisesOtherTokens, "test_enqueued_batches_are_received_unchanged"),
    (StoresPartOfABadCall, "test_a_call_with_an_unknown_queue_is_refused_whole"),
    (StoresDuplicates, "test_a_repeated_call_stores_nothing"),
    (StoresDuplicates, "test_a_call_over_several_queues_is_stored_once_as_a_whole"),
    (StoresDuplicates, "test_numbers_outlive_the_handle_as_the_data_does"),
    (KnowsOneProducerOnly, "test_producers_do_not_know_of_each_other"),
    (AcceptsHoles, "test_a_call_that_would_leave_a_hole_is_refused_until_it_is_filled"),
    (AcceptsHoles, "test_a_first_call_with_something_before_it_is_refused"),
    (CountsQueuesFromTheEnd, "test_a_queue_that_does_not_exist_is_refused"),
    (HasFixedBounds, "test_bounds_of_an_empty_queue_are_empty_and_grow_with_it"),
    (HasFixedBounds, "test_statistics_have_the_bounds"),
    (ClosesNothing, "test_a_closed_adapter_is_refused"),
    (ClosesNothing, "test_closing_the_adapter_wakes_a_waiting_receive"),
    (ClosesNothing, "test_a_closed_adapter_refuses_to_enqueue"),
    (ForgetsTheStart, "test_a_receiver_can_start_at_any_offset"),
    (ForgetsTheStart, "test_a_receiver_that_starts_at_the_next_offset_waits"),
    (StartsAboveTheEnd, "test_a_start_above_the_next_offset_is_refused"),
    (FindsTimesOneTooLate, "test_a_receiver_can_start_at_a_time"),
    (FindsOnlyLaterTimes, "test_a_time_finds_the_batch_that_was_stored_at_exactly_that_time"),
    (FindsTimesOneTooLate, "test_the_offsets_of_times_before_and_after_everything_are_the_bounds"),
    (ReachesOneTooFar, "test_limits_reach_as_far_as_their_events_and_bytes"),
    (ReachesPastTheEnd, "test_limits_reach_to_the_end_that_is_given_and_to_that_of_the_queue"),
    (with_receiver(NeverAcknowledges), "test_only_unacknowledged_batches_come_again_after_a_restart"),
    (with_receiver(NeverAcknowledges), "test_acknowledgement_of_one_handle_counts_for_the_other"),
    (DeclaresNothing, "test_the_inherited_classes_are_those_that_the_capabilities_ask_for"),
    (DeclaresNothing, "test_undeclared_capability_is_refused"),
]
"""A fault, and a test that has to fail with it."""

ARGUMENTS: dict[str, dict[str, int]] = {
    "test_receiving_with_limits_brings_the_same": {"max_events": 5, "max_bytes": 1 << 30},
    "test_random_steps_match_a_list": {"seed": 1},
    "test_offered_and_received_batches_are_all_of_them_once_and_in_order": {"seed": 1},
    "test_a_call_with_an_unknown_queue_is_refused_whole": {"queue": 2},
    "test_a_queue_that_does_not_exist_is_refused": {"queue": -1},
}


class Suite(ConformsToQueueAdapter, ConformsToRewindable, ConformsToDurable, ConformsToIdempotent):
    """One test, over an adapter with a fault: the memory adapter if it can do all that the test needs, else the log.
    Closes the adapters that a faulty one leaves open."""

    def __init__(self, fault: type[Adapter], test: str) -> None:
        self.fault = fault
        self.test = test
        self.opened: list[QueueAdapter] = []

    @property
    def sound(self) -> str:
        needs_log = any(hasattr(group, self.test) for group in (ConformsToRewindable, ConformsToDurable))
        return "log" if needs_log or "capabilities" in self.test or "declared" in self.test else "memory"

    async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
        HandsOutTheSameObjects.known = {}
        context = AdapterContext(provider="tests", queues=queues, directory=directory)
        self.opened.append(await open_adapter(self.sound, context, {}))
        return self.fault(self.opened[-1])

    async def run(self, directory: Path) -> None:
        method: Callable[..., Awaitable[None]] = getattr(self, self.test)
        try:
            await method(directory, **ARGUMENTS.get(self.test, {}))
        finally:
            for adapter in self.opened:
                await adapter.aclose()


@pytest.mark.long
@pytest.mark.parametrize(("fault", "test"), [pytest.param(*each, id=f"{each[0].__name__}-{each[1]}") for each in FINDS])
async def test_the_fault_is_found(fault: type[Adapter], test: str, tmp_path: Path):
    deadline_s.set(0.2)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await Suite(fault, test).run(tmp_path)
    await end_tasks_of_the_suite()


async def end_tasks_of_the_suite() -> None:
    """A failed test leaves its receives behind."""
    left = [task for task in asyncio.all_tasks() if task.get_name() == "receive"]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


@pytest.mark.long
@pytest.mark.parametrize("test", sorted({test for _, test in FINDS} - {"test_undeclared_capability_is_refused"}))
async def test_without_a_fault_the_test_passes(test: str, tmp_path: Path):
    await Suite(Adapter, test).run(tmp_path)


async def test_a_read_only_adapter_that_can_be_written_is_found(tmp_path: Path):
    class ReadOnlySuite(ConformsToReadOnly):
        async def open_adapter(self, queues: int, directory: Path) -> QueueAdapter:
            return await open_adapter("memory", AdapterContext(provider="tests", queues=queues), {})

    suite = ReadOnlySuite()
    with pytest.raises(pytest.fail.Exception):
        await suite.test_enqueue_is_refused(tmp_path)
    with pytest.raises(AssertionError, match="inherit from the classes"):
        await suite.test_the_inherited_classes_are_those_that_the_capabilities_ask_for(tmp_path)


def test_every_class_of_the_suite_is_asynchronous_for_pytest():
    assert [mark.name for mark in AdapterConformance.pytestmark] == ["asyncio"]  # type: ignore[attr-defined]
