"""Which checkpoints have to be saved: one that still holds is not made again."""

from headrace import CorruptRecord, EventBatch, SequenceToken
from headrace.agents import QueueCache
from headrace.agents.delivery.checkpoint_pacer import (
    ENTRIES_PER_S,
    HELD_BACK_S,
    MAX_ENTRIES,
    CheckpointPacer,
    UnsavedProgress,
)
from headrace.agents.delivery.progress import DeliveryProgress
from headrace.streams.subscriptions import Checkpoint, StreamBehind
from tests.simulation.deliveries import stream
from tests.simulation.groups import SimulatedGroup
from tests.simulation.virtual_time import virtual_time


class Saver:
    """Progress with a feed that is filled by hand."""

    caught_up = True
    finished = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.cache = QueueCache(1_000_000, 1 << 30)
        self.cache.next_offset = checkpoint.next_offset
        self.damage: CorruptRecord | None = None
        self.progress = DeliveryProgress(checkpoint)
        self.progress.join(self)
        self.pacer = CheckpointPacer(self.progress)

    def all_seen(self) -> None: ...

    def unsaved(self, now: float = 0.0) -> UnsavedProgress | None:
        return self.pacer.unsaved(now)

    def save(self, now: float = 0.0) -> UnsavedProgress:
        unsaved = self.unsaved(now)
        assert unsaved is not None
        unsaved.note_saved()
        return unsaved

    def publish(self, key: str) -> None:
        """An event that nobody takes."""
        batch = EventBatch.of(stream(key), [b""])
        batch.offset = self.cache.next_offset
        self.progress.offer(self, self.cache.add([batch]))
        self.progress.read_on(self)


def behind(count: int, *done: tuple[int, int, int]) -> Checkpoint:
    """So many streams wait at the beginning of a queue that was read up to their number. `done`: ranges of the first
    one."""
    streams = {stream(str(number)): StreamBehind(SequenceToken(number)) for number in range(count)}
    return Checkpoint(count, {**streams, stream("0"): StreamBehind(SequenceToken(0), "", done)})


def every_other(count: int) -> list[tuple[int, int, int]]:
    return [(0, index, index + 1) for index in range(1, 2 * count, 2)]


def test_progress_is_unsaved_until_it_is_said_to_be_stored() -> None:
    saver = Saver(behind(3))
    assert saver.unsaved() == saver.unsaved()
    saver.save()
    assert saver.unsaved(0.2) is None


def test_a_change_while_a_checkpoint_is_stored_is_unsaved() -> None:
    saver = Saver(behind(3))
    unsaved = saver.unsaved()
    assert unsaved is not None
    saver.progress.skip(2)
    unsaved.note_saved()
    assert saver.save().checkpoint.behind[stream("1")] == StreamBehind(SequenceToken(2))


def test_a_position_that_moves_is_unsaved() -> None:
    saver = Saver(behind(3))
    saver.save()
    saver.publish("new")
    assert saver.save().checkpoint == Checkpoint(4, {**behind(3).behind, stream("new"): StreamBehind(SequenceToken(3))})


def test_after_a_large_checkpoint_the_next_one_is_held_back() -> None:
    large = behind(MAX_ENTRIES + 10)
    saver = Saver(large)
    assert saver.save().checkpoint == large
    saver.publish("new")
    assert saver.unsaved(0.1) is None
    assert saver.pacer.held_back
    assert stream("new") in saver.save(0.11).checkpoint.behind
    assert saver.unsaved(0.2) is None
    assert not saver.pacer.held_back, "the saved one holds"


def test_a_checkpoint_is_held_back_for_a_bounded_time() -> None:
    saver = Saver(behind(20 * MAX_ENTRIES, *every_other(ENTRIES_PER_S * int(HELD_BACK_S))))
    saver.save()
    saver.publish("new")
    assert saver.unsaved(HELD_BACK_S - 0.1) is None
    saver.save(HELD_BACK_S)


def test_no_checkpoint_lacks_an_event_that_an_earlier_one_has() -> None:
    """Consumers know that it is saved."""
    saver = Saver(behind(1, *every_other(2 * MAX_ENTRIES)))
    (ranges,) = [each.done for each in saver.save().checkpoint.behind.values()]
    saver.publish("new")
    assert saver.save(HELD_BACK_S).checkpoint.behind[stream("0")].done == ranges


@virtual_time
async def test_a_consumer_that_takes_nothing_does_not_change_the_checkpoint() -> None:
    async with SimulatedGroup() as circle:
        circle.consumer("deaf", events=1)
        for number in range(100):
            circle.publish(str(number), "0")
        await circle.rest()
        unsaved = circle.delivery.unsaved()
        assert unsaved is not None
        unsaved.note_saved()
        await circle.rest()
        assert circle.delivery.unsaved() is None
