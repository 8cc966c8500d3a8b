"""The checks of the notes of a cluster's silos find each fault."""

from pathlib import Path

import pytest

from tests.faults.cluster_notes import (
    GOT,
    SAVED,
    Note,
    Notebook,
    Notes,
    check_complete,
    check_owners,
    check_saved_stays_done,
)


def got(at: int, silo: str = "a", epoch: int = 1, number: int = 0) -> Note:
    return Note(at, at, GOT, silo, "s", 0, epoch, "n/1", [number], [(number, 0)])


def saved(began: int, ended: int, silo: str = "a", epoch: int = 1, done: int = 1, **fields: object) -> Note:
    return Note(began, ended, SAVED, silo, "s", 0, epoch, next_offset=done)._replace(**fields)


def test_owners_one_after_another_are_fine() -> None:
    check_owners([got(1), saved(2, 4), got(3), got(5, "b", 2), saved(6, 7, "b", 2)])


@pytest.mark.parametrize(
    "notes",
    [
        [got(1, epoch=0)],
        [got(1), got(2, "b")],
        [got(1), got(2, "b", 2), got(3)],
        [saved(1, 2, "b", 2), saved(3, 4)],
    ],
    ids=["no lease", "two silos with one lease", "handled after the next owner did", "saved after the next owner did"],
)
def test_a_second_owner_is_found(notes: list[Note]) -> None:
    with pytest.raises(AssertionError):
        check_owners(notes)


def test_save_during_the_start_of_the_next_owner_may_be_earlier() -> None:
    check_owners([saved(1, 5), saved(2, 6, "b", 2)])


def test_unsaved_event_may_come_again() -> None:
    check_saved_stays_done([got(1, number=3), saved(2, 3, done=3), got(4, number=3)], "s")
    check_saved_stays_done([got(1), saved(2, 3, done=9, behind={"n/1": (0, 0)}), got(4)], "s")


@pytest.mark.parametrize("behind", [{}, {"n/1": (1, 0)}])
def test_saved_event_that_comes_again_is_found(behind: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(AssertionError, match="came again"):
        check_saved_stays_done([got(1), saved(2, 3, done=9, behind=behind), got(4)], "s")


def test_all_that_was_published_has_to_come_in_order() -> None:
    check_complete("s", [("n/1", 0), ("n/1", 1), ("n/1", 0), ("n/1", 1)], {"n/1": 2})
    with pytest.raises(AssertionError, match="overtook"):
        check_complete("s", [("n/1", 1)], {"n/1": 2})
    with pytest.raises(AssertionError, match="never came"):
        check_complete("s", [("n/1", 0)], {"n/1": 2})
    with pytest.raises(AssertionError, match="came again"):
        check_complete("s", [("n/1", 0), ("n/1", 0)], {"n/1": 1}, once=True)


def test_notes_are_read_as_they_come(tmp_path: Path) -> None:
    notebook, notes = Notebook(tmp_path / "notes"), Notes()
    assert list(notes.read([tmp_path / "notes", tmp_path / "missing"])) == []
    notebook.write(got(1), got(2))
    assert len(notes.read([tmp_path / "notes"])) == 2
    notebook.write(saved(0, 3, behind={"n/1": (1, 0)}))
    assert [note.began_ns for note in notes.read([tmp_path / "notes"])] == [0, 1, 2]
