"""Background tasks and repeated work, in virtual time."""

import asyncio
import itertools
import logging

import pytest

from headrace import StorageError
from headrace.streams.background import AGAIN_S, MAX_PAUSE_S, BackgroundTasks, end, first_of, run_periodically, ticks
from tests.simulation.virtual_time import virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


async def fails(error: Exception, after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    raise error


async def swallows(cancellations: int) -> None:
    """Go on after so many cancellations, as `asyncio.wait_for` does before Python 3.12 if it is done at that moment."""
    while True:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            cancellations -= 1
            if cancellations < 0:
                raise


@virtual_time
async def test_a_task_runs_until_it_ends_although_nothing_else_refers_to_it():
    background, ended = BackgroundTasks(), list[str]()

    async def work() -> None:
        await asyncio.sleep(1)
        ended.append(asyncio.current_task().get_name())  # type: ignore[union-attr]

    background.start(work(), "headrace test")
    assert background
    assert "headrace test" in background
    assert "headrace" not in background
    await background.join()
    assert ended == ["headrace test"]
    assert not background
    assert "headrace test" not in background


@virtual_time
async def test_a_task_that_has_ended_does_not_count_in_the_same_turn():
    background = BackgroundTasks()
    task = background.start(asyncio.sleep(1), "headrace test")
    await asyncio.wait([task])
    assert not background


async def test_an_unforeseen_error_is_logged_once_with_its_cause(caplog: pytest.LogCaptureFixture):
    background = BackgroundTasks()
    background.start(fails(ZeroDivisionError("by nothing")), "headrace test")
    await background.join()
    await background.aclose()
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == "task 'headrace test' failed: by nothing"
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


async def test_a_foreseen_error_is_logged_without_a_traceback(caplog: pytest.LogCaptureFixture):
    background = BackgroundTasks()
    background.start(fails(StorageError("no disk")), "headrace test")
    await background.join()
    [record] = caplog.records
    assert record.exc_info is None


async def test_the_error_of_a_held_task_is_its_callers(caplog: pytest.LogCaptureFixture):
    background = BackgroundTasks()
    with pytest.raises(StorageError, match="no disk"):
        await asyncio.shield(background.hold(fails(StorageError("no disk")), "headrace test"))
    assert caplog.records == []


@virtual_time
async def test_the_error_of_finished_work_is_logged_only_if_its_caller_is_gone(caplog: pytest.LogCaptureFixture):
    background = BackgroundTasks()
    with pytest.raises(StorageError, match="no disk"):
        await background.finish(fails(StorageError("no disk")), "headrace test")
    assert caplog.records == []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await background.finish(fails(StorageError("no disk"), after_s=5), "headrace test")
    await background.join()
    [record] = caplog.records
    assert record.getMessage() == "task 'headrace test' failed: no disk"


@virtual_time
async def test_a_held_task_outlives_its_caller_and_its_error_is_no_warning():
    background, warnings = BackgroundTasks(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: warnings.append(context))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await asyncio.shield(background.hold(fails(StorageError("no disk"), after_s=5), "headrace test"))
    assert background
    await background.join()
    assert now() == 1005
    assert warnings == []


@virtual_time
async def test_closing_cancels_all_tasks_and_waits_for_their_cleanup():
    background, steps = BackgroundTasks(), list[str]()

    async def work(name: str, cleanup_s: float) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(cleanup_s)
            steps.append(name)

    async with background:
        background.start(work("slow", 0.5), "headrace slow")
        background.start(work("quick", 0.1), "headrace quick")
        await asyncio.sleep(10)
    assert steps == ["quick", "slow"]
    assert now() == 1010.5
    assert not background


@virtual_time
async def test_closing_ends_tasks_that_other_tasks_start_meanwhile():
    background = BackgroundTasks()

    async def work() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            background.start(asyncio.sleep(1e6), "headrace later")

    background.start(work(), "headrace test")
    await asyncio.sleep(1)
    await background.aclose()
    assert not background
    assert now() == 1001


@virtual_time
async def test_a_task_that_swallows_cancellations_is_cancelled_again():
    background = BackgroundTasks()
    background.start(swallows(3), "headrace test")
    await asyncio.sleep(1)
    await background.aclose()
    assert now() == 1001 + 3 * AGAIN_S


@virtual_time
async def test_waiting_for_tasks_ends_after_its_time_and_cancels_none():
    async with BackgroundTasks() as background:
        task = background.start(asyncio.sleep(100), "headrace test")
        await background.join(5)
        assert now() == 1005
        assert not task.done()
        await background.join()
        assert now() == 1100


@virtual_time
async def test_end_takes_tasks_in_every_state():
    running, failing = asyncio.create_task(asyncio.sleep(1e6)), asyncio.create_task(fails(StorageError("no disk")))
    done = asyncio.create_task(asyncio.sleep(0, "result"))
    await asyncio.wait([done])
    await end(running, None, failing, done)
    await end()
    assert running.cancelled()
    assert isinstance(failing.exception(), StorageError)
    assert done.result() == "result"


@virtual_time
async def test_periodic_work_goes_on_after_errors_with_longer_pauses_and_recovers(caplog: pytest.LogCaptureFixture):
    began: list[float] = []
    errors = [None, StorageError("no disk"), StorageError("no disk"), ZeroDivisionError(), None, None]

    async def work() -> None:
        began.append(now())
        if (error := errors[len(began) - 1]) is not None:
            raise error

    async with BackgroundTasks() as background:
        background.start(run_periodically(work, 0.25), "headrace test")
        await asyncio.sleep(3.3)
    pauses = [after - before for before, after in itertools.pairwise([1000.0, *began])]
    assert pauses == [0.25, 0.25, 0.5, MAX_PAUSE_S, MAX_PAUSE_S, 0.25]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR"]
    assert caplog.messages[0] == "background work 'headrace test' failed and is tried again: no disk"


@virtual_time
async def test_periodic_work_that_takes_long_gets_a_twentieth_of_the_time_but_runs_every_second():
    began: list[float] = []
    lengths_s = [0.025, 0.5, 0.0, 0.0]

    async def work() -> None:
        began.append(now())
        await asyncio.sleep(lengths_s[len(began) - 1])

    async with BackgroundTasks() as background:
        background.start(run_periodically(work, 0.125), "headrace test")
        await asyncio.sleep(2.3)
    pauses = [after - before for before, after in itertools.pairwise(began)]
    assert pauses == pytest.approx([0.025 + 0.5, 0.5 + MAX_PAUSE_S, 0.125])


@virtual_time
async def test_ticks_say_for_how_long_the_process_did_not_run():
    late: list[float] = []
    loop = asyncio.get_running_loop()

    async for late_s in ticks(1.0):
        late.append(late_s)
        if len(late) == 4:
            break
        loop.call_later(0.5, loop.pass_time, [0.25, 1.25, 9.5][len(late) - 1])  # type: ignore[attr-defined]
    assert late == [0.0, 0.0, 0.0, 9.0]


@virtual_time
async def test_the_first_of_several_works_gives_the_result_and_the_others_end():
    ended: list[str] = []

    async def work(name: str, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(name)
        return name

    assert await first_of(work("slow", 5), work("quick", 1), name="headrace test") == "quick"
    assert sorted(ended) == ["quick", "slow"]
    assert now() == 1001


@virtual_time
async def test_the_first_of_several_works_raises_its_error():
    with pytest.raises(StorageError, match="no disk"):
        await first_of(asyncio.sleep(5), fails(StorageError("no disk"), after_s=1), name="headrace test")


@virtual_time
async def test_of_works_that_end_together_the_one_named_first_counts():
    assert await first_of(asyncio.sleep(1, "first"), asyncio.sleep(1, "second"), name="headrace test") == "first"


@virtual_time
async def test_cancelling_the_caller_ends_all_works():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await first_of(asyncio.sleep(5), asyncio.sleep(6), name="headrace test")
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual_time
async def test_periodic_work_that_sleeps_is_done_once_for_each_time_that_it_is_woken():
    woken, times = asyncio.Event(), list[float]()

    async def work() -> None:
        woken.clear()
        times.append(now())

    async def sleep() -> None:
        await woken.wait()

    async with BackgroundTasks() as background:
        background.start(run_periodically(work, 0.5, sleep), "headrace test")
        for _ in range(2):
            await asyncio.sleep(3600)
            woken.set()
        await asyncio.sleep(3600)
    assert times == [1000 + 3600.5, 1000 + 7200.5]
