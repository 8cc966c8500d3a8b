"""Publishing staged batches: once, even if a process dies or repeats the work at any step."""

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from headrace import Provider, StreamId
from headrace.pipeline import publishing
from headrace.pipeline.grouping import RowGrouping
from headrace.pipeline.place import ProviderPlace
from headrace.pipeline.publishing import (
    BatchPublisher,
    EmbeddedDestination,
    PublishDestination,
    SiloDestination,
    open_destination,
    producer_of,
)
from headrace.pipeline.staging import BatchManifest, Chunk, PublishChunkLimits, StagedFile, StagedReport, StagingFolder
from headrace.streams.errors import HeadraceError, NotFound, NotSupported, StorageError, Unavailable
from headrace.streams.publishing import ProducerSequence
from tests.client.silos import SiloProcess, silo, silos, stored

__all__ = ("silo", "silos")

SMALL = PublishChunkLimits(70, 3)
"""Small enough that a batch has several chunks."""


class KilledError(Exception):
    """The process is gone."""


class Steps:
    """Counts what publishing does, before and after each step, and lets something happen at one of them."""

    def __init__(self, at: int, happens: Callable[[], None]) -> None:
        self._left = at
        self._happens = happens
        self.reached = False

    def step(self) -> None:
        if self._left == 0:
            self.reached = True
            self._happens()
        self._left -= 1


class SteppingFolder(StagingFolder):
    steps: Steps

    def claim(self, manifest: BatchManifest) -> BatchManifest:
        self.steps.step()
        claimed = super().claim(manifest)
        self.steps.step()
        return claimed

    def finish(self, batch: int) -> None:
        self.steps.step()
        super().finish(batch)
        self.steps.step()

    def clear(self, batch: int) -> None:
        self.steps.step()
        super().clear(batch)
        self.steps.step()

    def pending(self, up_to: int) -> list[BatchManifest]:
        found = super().pending(up_to)
        self.steps.step()
        return found


class SteppingDestination:
    def __init__(self, destination: PublishDestination, steps: Steps) -> None:
        self._destination = destination
        self._steps = steps
        self.max_pending = destination.max_pending

    async def last_sequence(self, producer: str) -> int:
        number = await self._destination.last_sequence(producer)
        self._steps.step()
        return number

    async def store(self, chunk: Chunk, sequence: ProducerSequence) -> None:
        self._steps.step()
        await self._destination.store(chunk, sequence)
        self._steps.step()


@pytest.fixture
def place(tmp_path: Path) -> ProviderPlace:
    return ProviderPlace(str(tmp_path / "d"), None)


def folder_of(tmp_path: Path, app: str, kind: type[StagingFolder] = StagingFolder) -> StagingFolder:
    return kind.of(tmp_path / "staging", "default", app)


def stage(folder: StagingFolder, namespace: str, text: str, *, tasks: int = 2, rows: int = 12) -> list[StagedReport]:
    """Return the messages of some tasks. In each of four streams, all rows of the first come before the second's."""
    found: list[StagedReport] = []
    for task in range(tasks):
        keys = [f"k{row % 4}" for row in range(rows)]
        payloads = [f"{text}{task}-{row:02}".encode() for row in range(rows)]
        file = StagedFile(folder.path, task, 0)
        for half in (slice(0, rows // 2), slice(rows // 2, rows)):
            batch = pa.RecordBatch.from_arrays([pa.array(keys[half]), pa.array(payloads[half])], ["key", "payload"])
            if rows:
                file.add(RowGrouping(namespace).of(batch))
        found.append(file.finish())
    return found[::-1]  # Spark gives the messages in any order


def content(namespace: str, text: str, *, tasks: int = 2, rows: int = 12) -> dict[StreamId, list[bytes]]:
    return {
        StreamId(namespace, f"k{key}"): [
            f"{text}{task}-{row:02}".encode() for task in range(tasks) for row in range(key, rows, 4)
        ]
        for key in range(4)
    }


def of_namespace(found: dict[StreamId, list[bytes]], namespace: str) -> dict[StreamId, list[bytes]]:
    return {stream: payloads for stream, payloads in found.items() if stream.namespace == namespace}


def look(place: ProviderPlace) -> dict[StreamId, list[bytes]]:
    assert place.data is not None
    return asyncio.run(stored(Path(place.data)))


def commit(place: ProviderPlace, folder: StagingFolder, app: str, batch: int, files: Sequence[StagedReport]) -> None:
    publishing.commit(place, folder, app, batch, files, limits=SMALL)


# ---- one batch -------------------------------------------------------------------------------------------------------


def test_a_batch_is_published_in_order_and_leaves_no_files(place: ProviderPlace, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "app")
    commit(place, folder, "app", 0, stage(folder, "n", "a"))
    assert look(place) == content("n", "a")
    assert [path.name for path in folder.path.iterdir()] == ["0.done"]


def test_a_batch_that_comes_again_is_not_published_again(place: ProviderPlace, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "app")
    for text in "abc":
        commit(place, folder, "app", 5, stage(folder, "n", text))
    assert look(place) == content("n", "a")
    assert [path.name for path in folder.path.iterdir()] == ["5.done"]


def test_the_log_knows_the_published_chunks_if_the_folder_has_forgotten(place: ProviderPlace, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "app")
    commit(place, folder, "app", 5, stage(folder, "n", "a"))
    (folder.path / "5.done").unlink()
    commit(place, folder, "app", 5, stage(folder, "n", "b"))
    assert look(place) == content("n", "a")


def test_batches_and_applications_go_beside_each_other(place: ProviderPlace, tmp_path: Path) -> None:
    for app, batch in itertools.product(("a", "b" * 500), (0, 1, 7)):
        folder = folder_of(tmp_path, app)
        commit(place, folder, app, batch, stage(folder, f"{app[0]}{batch}", "x"))
    found = look(place)
    for app, batch in itertools.product("ab", (0, 1, 7)):
        assert of_namespace(found, f"{app}{batch}") == content(f"{app}{batch}", "x")


def test_an_empty_batch_is_done(place: ProviderPlace, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "app")
    commit(place, folder, "app", 0, stage(folder, "n", "a", rows=0))
    assert [path.name for path in folder.path.iterdir()] == ["0.done"]
    commit(place, folder, "app", 0, stage(folder, "n", "a"))
    assert look(place) == {}
    commit(place, folder, "app", 1, stage(folder, "n", "b"))
    assert look(place) == content("n", "b")


# ---- killed, and come again ------------------------------------------------------------------------------------------


def kill() -> None:
    raise KilledError


async def commit_stepping(
    destination: PublishDestination, tmp_path: Path, app: str, steps: Steps, files: Sequence[StagedReport]
) -> None:
    folder = folder_of(tmp_path, app, SteppingFolder)
    assert isinstance(folder, SteppingFolder)
    folder.steps = steps
    await BatchPublisher(SteppingDestination(destination, steps), folder, app, SMALL).commit(3, files)


async def killed_everywhere(place: ProviderPlace, tmp_path: Path) -> dict[str, str]:
    """Commit again and again, each time killed at one step later, and then once more with other rows. Returns by
    namespace which rows are to be there."""
    wanted: dict[str, str] = {}
    async with open_destination(place) as destination:
        for number in itertools.count():
            app = f"app{number}"
            steps, folder = Steps(number, kill), folder_of(tmp_path, app)
            try:
                await commit_stepping(destination, tmp_path, app, steps, stage(folder, app, "a"))
            except KilledError:
                claimed = folder.manifest(3) is not None or folder.done() == 3
                await BatchPublisher(destination, folder, app, SMALL).commit(3, stage(folder, app, "b"))
                wanted[app] = "a" if claimed else "b"
                assert folder.done() == 3
                assert list(folder.path.glob("*.manifest")) == []
            else:
                assert number > 25
                assert not steps.reached
                return wanted
    raise AssertionError


def test_batch_is_published_once_wherever_a_process_is_killed(place: ProviderPlace, tmp_path: Path) -> None:
    wanted = asyncio.run(killed_everywhere(place, tmp_path))
    assert set(wanted.values()) == {"a", "b"}
    found = look(place)
    for app, text in wanted.items():
        assert of_namespace(found, app) == content(app, text), app


@pytest.mark.long
def test_the_same_over_grpc(silo: SiloProcess, tmp_path: Path) -> None:
    wanted = asyncio.run(killed_everywhere(ProviderPlace(None, silo.address), tmp_path))
    silo.stop()
    found = asyncio.run(stored(silo.data))
    for app, text in wanted.items():
        assert of_namespace(found, app) == content(app, text), app


def test_another_driver_at_any_step_stores_nothing_twice(place: ProviderPlace, tmp_path: Path) -> None:
    """One driver stands still somewhere, another one does the whole batch meanwhile, then the first goes on."""

    async def main() -> int:
        async with open_destination(place) as destination:
            for number in itertools.count():
                app = f"app{number}"
                folder = folder_of(tmp_path, app)
                mine, others = stage(folder, app, "a"), stage(folder, app, "b")

                def meanwhile(
                    app: str = app, folder: StagingFolder = folder, others: Sequence[StagedReport] = others
                ) -> None:
                    with ThreadPoolExecutor() as thread:
                        thread.submit(commit, place, folder, app, 3, others).result()

                steps = Steps(number, meanwhile)
                await commit_stepping(destination, tmp_path, app, steps, mine)
                assert [path.name for path in folder.path.glob("*.manifest")] == []
                if not steps.reached:
                    return number
        raise AssertionError

    steps = asyncio.run(main())
    assert steps > 25
    found = look(place)
    for number in range(steps):
        app = f"app{number}"
        assert of_namespace(found, app) in (content(app, "a"), content(app, "b")), app


def test_a_repeated_publish_stores_only_missing_chunks(place: ProviderPlace, tmp_path: Path) -> None:
    class Counting(EmbeddedDestination):
        numbers: list[int]

        def store(self, chunk: Chunk, sequence: ProducerSequence) -> Awaitable[object]:
            if len(self.numbers) == 2:
                raise KilledError
            self.numbers.append(sequence.number & 0xFFFFF)
            return super().store(chunk, sequence)

    async def attempt(provider: Provider) -> list[int]:
        counting = Counting(provider)
        counting.numbers = []
        try:
            await BatchPublisher(counting, folder, "app", SMALL).commit(0, stage(folder, "n", "a"))
        except KilledError:
            return counting.numbers
        return [*counting.numbers, -1]

    async def main() -> list[list[int]]:
        async with Provider.open(place.data) as provider:
            return [await attempt(provider) for _ in range(12)]

    folder = folder_of(tmp_path, "app")
    attempts = asyncio.run(main())
    numbers = [number for attempt in attempts for number in attempt if number >= 0]
    assert numbers == [*range(len(numbers) - 1), 0xFFFFF]
    assert [len(attempt) for attempt in attempts[:2]] == [2, 2]
    assert attempts[-1] == [-1]
    assert look(place) == content("n", "a")


def test_failure_that_may_pass_is_retried(place: ProviderPlace, tmp_path: Path) -> None:
    class Failing(EmbeddedDestination):
        failures: Iterator[HeadraceError]

        async def store(self, chunk: Chunk, sequence: ProducerSequence) -> None:
            error = next(self.failures, None)
            if error is None or isinstance(error, Unavailable):
                await super().store(chunk, sequence)
            if error is not None:
                raise error

    async def main() -> None:
        async with Provider.open(place.data) as provider:
            failing = Failing(provider)
            failing.failures = iter([Unavailable("stored, but the answer is lost"), StorageError("not stored")])
            await BatchPublisher(failing, folder, "app", SMALL).commit(0, stage(folder, "n", "a"))

    folder = folder_of(tmp_path, "app")
    asyncio.run(main())
    assert look(place) == content("n", "a")


def test_a_silo_that_is_away_for_a_moment_is_waited_for(silo: SiloProcess, tmp_path: Path) -> None:
    class Away(SiloDestination):
        calls = 0

        def store(self, chunk: Chunk, sequence: ProducerSequence) -> Awaitable[object]:
            self.calls += 1
            if self.calls == 2:
                silo.kill()
                silo.start()
            return super().store(chunk, sequence)

    async def main() -> None:
        async with open_destination(ProviderPlace(None, silo.address)) as destination:
            assert isinstance(destination, SiloDestination)
            destination.__class__ = Away
            await BatchPublisher(destination, folder, "app", SMALL).commit(0, stage(folder, "n", "a"))

    folder = folder_of(tmp_path, "app")
    asyncio.run(main())
    silo.stop()
    assert asyncio.run(stored(silo.data)) == content("n", "a")


# ---- batches of one application that are not in order ----------------------------------------------------------------


def begin(place: ProviderPlace, folder: StagingFolder, batch: int, files: Sequence[StagedReport], chunks: int) -> None:
    """Publish some chunks of a batch, and be gone."""

    async def main() -> None:
        async with open_destination(place) as destination:
            dying = SteppingDestination(destination, Steps(2 + 2 * chunks, kill))
            with pytest.raises(KilledError):
                await BatchPublisher(dying, folder, "app", SMALL).commit(batch, files)

    asyncio.run(main())


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_an_earlier_batch_that_was_left_is_finished_first(place: ProviderPlace, tmp_path: Path, chunks: int) -> None:
    folder = folder_of(tmp_path, "app")
    begin(place, folder, 5, stage(folder, "n", "a"), chunks)
    commit(place, folder, "app", 6, stage(folder, "n", "b"))
    both = {stream: [*first, *content("n", "b")[stream]] for stream, first in content("n", "a").items()}
    assert look(place) == both
    assert [path.name for path in folder.path.iterdir()] == ["6.done"]


def test_a_batch_after_a_later_one_counts_as_published(place: ProviderPlace, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "app")
    commit(place, folder, "app", 6, stage(folder, "n", "b"))
    commit(place, folder, "app", 5, stage(folder, "n", "a"))
    assert look(place) == content("n", "b")


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_half_a_batch_without_its_manifest_is_not_gone_on_with(place: ProviderPlace, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "app")
    begin(place, folder, 5, stage(folder, "n", "a"), 2)
    (folder.path / "5.manifest").unlink()
    for _ in range(2):
        with pytest.raises(StorageError, match=r"batch 5 of txnAppId 'app' is half published, and .* has no manifest"):
            commit(place, folder, "app", 5, stage(folder, "n", "b"))


def test_a_batch_that_was_left_until_its_producer_was_forgotten_is_not_gone_on_with(
    place: ProviderPlace, tmp_path: Path
) -> None:
    class Forgetful(EmbeddedDestination):
        def __init__(self, provider: Provider) -> None:
            super().__init__(provider)
            self.last_sequence = self.forgotten

        async def forgotten(self, producer: str) -> int:
            return 0 * len(producer)

    async def main() -> None:
        async with Provider.open(place.data) as provider:
            await BatchPublisher(Forgetful(provider), folder, "app", SMALL).commit(5, stage(folder, "n", "b"))

    folder = folder_of(tmp_path, "app")
    begin(place, folder, 5, stage(folder, "n", "a"), 1)
    old = time.time() - 7 * 24 * 3600
    os.utime(folder.path / "5.manifest", (old, old))
    with pytest.raises(
        StorageError, match=r"batch 5 of txnAppId 'app' was left 7 days ago, .*/5\.manifest to publish it"
    ):
        asyncio.run(main())


def test_staged_files_that_are_not_here_are_named(place: ProviderPlace, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "app")
    files = stage(folder, "n", "a")
    (folder.path / files[0].name).unlink()
    with pytest.raises(NotFound, match="was staged by a task, and the driver does not see it: the driver and all"):
        commit(place, folder, "app", 5, files)
    assert folder.manifest(5) is None


def test_staged_files_that_a_manifest_names_and_are_gone_are_named(place: ProviderPlace, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "app")
    files = stage(folder, "n", "a")
    begin(place, folder, 5, files, 1)
    (folder.path / files[0].name).unlink()
    with pytest.raises(NotFound, match="which was staged, is gone"):
        commit(place, folder, "app", 5, stage(folder, "n", "b"))


def test_queues_that_forget_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with Provider.open(tmp_path / "d", adapter="memory"):
            pass
        async with open_destination(ProviderPlace(str(tmp_path / "d"), None)):
            pass

    with pytest.raises(NotSupported, match="provider 'default': the sink needs an adapter that is durable"):
        asyncio.run(main())


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    folder, place = folder_of(tmp_path, "app"), ProviderPlace(None, "127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"no silo answers at 127\.0\.0\.1:1") as refused:
        publishing.commit(place, folder, "app", 0, stage(folder, "n", "a"), connect_s=0.2)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("app", ["", "x" * 10, "x" * 500, "é" * 100])
def test_a_producer_has_a_name_that_every_provider_takes(app: str) -> None:
    assert len(producer_of(app).encode()) <= 128
    assert producer_of(app) != producer_of(app + "x")


def stage_later(folder: StagingFolder, namespace: str, **columns: float) -> list[StagedReport]:
    rows = {"key": ["a", "b"], "payload": [b"now", b"later"]} | {name: [0, value] for name, value in columns.items()}
    file = StagedFile(folder.path, 0, 0)
    file.add(RowGrouping(namespace).of(pa.RecordBatch.from_pydict(rows)))
    return [file.finish()]


def test_delayed_rows_are_stored_once_if_the_provider_delays(place: ProviderPlace, tmp_path: Path) -> None:
    later = place._replace(delays="store")
    for _ in range(2):
        folder = folder_of(tmp_path, "app")
        commit(later, folder, "app", 3, stage_later(folder, "n", delay=3600.0))

    async def waiting() -> int:
        async with Provider.open(place.data, delays="store") as provider:
            return sum(each.events for each in (await provider.store.delay_store().backlogs("default")).values())

    assert asyncio.run(waiting()) == 1
    assert [payload for of in look(place).values() for payload in of] == [b"now"]


@pytest.mark.parametrize(
    ("columns", "told"), [({"delay": 1.0}, "cannot delay events"), ({"priority": 1}, "has no priorities")]
)
def test_unsupported_call_is_refused_and_nothing_of_it_is_stored(
    place: ProviderPlace, tmp_path: Path, columns: dict[str, float], told: str
) -> None:
    folder = folder_of(tmp_path, "app")
    with pytest.raises(NotSupported, match=told):
        commit(place, folder, "app", 3, stage_later(folder, "n", **columns))
    assert look(place) == {}
