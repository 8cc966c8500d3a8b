"""The folder in which a sink keeps rows that are written and not published yet."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.grouping import EncodedBatches
from headrace.pipeline.staging import (
    ORPHAN_AGE_S,
    BatchManifest,
    PublishChunkLimits,
    StagedFile,
    StagedReport,
    StagedSegment,
    StagingFolder,
    chunks,
    read_segments,
    staging_directory,
)
from headrace.streams.errors import InvalidArgument, StorageError

CUTTING = PublishChunkLimits(100, 10)


@pytest.fixture
def folder(tmp_path: Path) -> StagingFolder:
    return StagingFolder.of(tmp_path, "default", "app")


def grouped(*elements: bytes) -> EncodedBatches:
    """Group any bytes: a folder does not check that they are batches."""
    return EncodedBatches(list(elements), [len(each) for each in elements], [1] * len(elements), [0] * len(elements))


def staged(folder: StagingFolder, *elements: bytes, partition: int = 0) -> StagedReport:
    file = StagedFile(folder.path, partition, 7)
    if elements:
        file.add(grouped(*elements))
    return file.finish()


def files(folder: StagingFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def age(path: Path) -> None:
    old = time.time() - ORPHAN_AGE_S - 10
    os.utime(path, (old, old))


def test_a_file_has_the_segments_that_were_added(folder: StagingFolder) -> None:
    file = StagedFile(folder.path, 3, 7)
    file.add(grouped(b"one", b"three"))
    file.add(grouped(b"5"))
    name, partition, events = file.finish()
    assert (partition, events) == (3, 3)
    read = [(segment.elements, segment.lengths.tolist()) for segment in read_segments(folder.path / name)]
    assert read == [(b"onethree", [3, 5]), (b"5", [1])]


def test_a_task_without_rows_leaves_no_file(folder: StagingFolder) -> None:
    assert staged(folder) == StagedReport("", 0, 0)
    assert files(folder) == []


@pytest.mark.parametrize("at", [0, 5, 9, 18, 25, 36])
def test_a_damaged_file_is_noticed(folder: StagingFolder, at: int) -> None:
    path = folder.path / staged(folder, b"one", b"three").name
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match="is damaged"):
        list(read_segments(path))


@pytest.mark.parametrize("size", [1, 19, 21, 45])
def test_a_file_that_is_cut_short_is_noticed(folder: StagingFolder, size: int) -> None:
    path = folder.path / staged(folder, b"one", b"three").name
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(StorageError, match="is damaged"):
        list(read_segments(path))


@given(st.lists(st.lists(st.integers(1, 120), max_size=12), max_size=6))
def test_chunks_have_everything_in_order_within_the_limits(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]]
) -> None:
    folder = StagingFolder(tmp_path_factory.mktemp("staging"))
    elements = [[bytes([index % 251]) * size for index, size in enumerate(some)] for some in sizes]
    file = StagedFile(folder.path, 0, 0)
    for some in elements:
        if some:
            file.add(grouped(*some))
    name = file.finish().name
    segments: Sequence[StagedSegment] = list(read_segments(folder.path / name)) if name else []
    found: list[bytes] = []
    for chunk in chunks(segments, CUTTING):
        parts = [span.segment.elements[span.start : span.end] for span in chunk]
        count = sum(span.last - span.first for span in chunk)
        assert 0 < count <= 10
        assert count == 1 or sum(map(len, parts)) <= 100
        found += parts
    assert b"".join(found) == b"".join(each for some in elements for each in some)


def test_the_first_manifest_of_a_batch_is_the_one(folder: StagingFolder) -> None:
    first, second = BatchManifest(4, ["a"], CUTTING), BatchManifest(4, ["b"], CUTTING)
    assert folder.claim(first) == first
    assert folder.claim(second) == first
    assert folder.pending(9) == [first]
    assert files(folder) == ["4.manifest"]


def test_files_of_a_finished_batch_are_removed(folder: StagingFolder) -> None:
    mine, other = staged(folder, b"a"), staged(folder, b"b")
    folder.claim(BatchManifest(4, [mine.name], CUTTING))
    folder.finish(4)
    assert files(folder) == sorted([other.name, "4.done"])
    assert (folder.done(), folder.pending(9)) == (4, [])
    folder.finish(5)
    assert files(folder) == sorted([other.name, "5.done"])


def test_done_never_goes_back(folder: StagingFolder) -> None:
    folder.finish(7)
    folder.finish(3)
    assert folder.done() == 7


def test_file_that_a_manifest_names_is_not_discarded(folder: StagingFolder) -> None:
    mine, other = staged(folder, b"a"), staged(folder, b"b")
    folder.claim(BatchManifest(4, [mine.name], CUTTING))
    folder.discard([mine.name, other.name, ""])
    assert files(folder) == sorted([mine.name, "4.manifest"])


def test_a_sweep_deletes_old_files_without_an_owner(folder: StagingFolder) -> None:
    old, named, young = (staged(folder, b"a").name for _ in range(3))
    folder.claim(BatchManifest(4, [named], CUTTING))
    for name in (old, named, "4.manifest"):
        age(folder.path / name)
    folder.sweep()
    assert files(folder) == sorted([named, young, "4.manifest"])


def test_a_sweep_takes_writes_of_one_batch_that_were_left(tmp_path: Path, folder: StagingFolder) -> None:
    left, running = (StagingFolder.of(tmp_path, "default", app, once=True) for app in ("left", "running"))
    for each in (left, running):
        name = staged(each, b"a").name
        each.claim(BatchManifest(0, [name], CUTTING))
    for path in (*left.path.iterdir(), left.path):
        age(path)
    folder.sweep()
    assert [path.name for path in (tmp_path / "default").iterdir()] == ["once-running"]


def test_a_write_of_one_batch_leaves_nothing(tmp_path: Path) -> None:
    folder = StagingFolder.of(tmp_path, "default", "x", once=True)
    folder.claim(BatchManifest(0, [staged(folder, b"a").name], CUTTING))
    folder.finish(0)
    assert not folder.path.exists()
    assert folder.pending(0) == []


def test_applications_have_folders_of_their_own(tmp_path: Path) -> None:
    names = ["a", "a/b", "../a", ".", "é" * 300, "é" * 301, "x" * 5000, "%"]
    folders = {StagingFolder.of(tmp_path, "default", name).path for name in names}
    assert len(folders) == len(names)
    for folder in folders:
        assert folder.parent == tmp_path / "default"
        folder.mkdir(parents=True)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"staging '.*file/default/app-x': cannot be used: Not a dir") as refused:
        staged(StagingFolder.of(tmp_path / "file", "default", "x"), b"a")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/a/b", "/a/b"),
        ("file:/a/b", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("file://localhost/a", "/a"),
        ("/odd:name/s3://x", "/odd:name/s3://x"),
    ],
)
def test_a_directory_may_be_a_url_of_a_file(text: str, path: str) -> None:
    assert staging_directory("option 'staging':", text) == Path(path)


@pytest.mark.parametrize("text", ["s3://bucket/a", "s3a://b", "hdfs:/a", "gs://b/c", "", "file://elsewhere/a"])
def test_path_on_no_file_system_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"option 'staging': .* is on no file system"):
        staging_directory("option 'staging':", text)
