"""The documents name folders, files, functions, tests and headings that exist."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.plain_english import NOT_OURS, REPOSITORY

PAGES = sorted(
    page.relative_to(REPOSITORY).as_posix()
    for page in (
        REPOSITORY / "README.md",
        REPOSITORY / "CONTRIBUTING.md",
        REPOSITORY / "benchmarks" / "RESULTS.md",
        *(REPOSITORY / "docs").glob("*.md"),
        *(REPOSITORY / "examples").rglob("*.md"),
    )
)
FOLDERS = {path.name for path in REPOSITORY.iterdir() if path.is_dir() and "." not in path.name} - NOT_OURS
MAP = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")


def defines(module: str, name: str) -> bool:
    """Whether a module defines a class, a function, an attribute or a constant of this name."""
    return re.search(rf"^\s*(?:(?:async )?def |class |self\.)?{name}\b *[:=(]", module, re.MULTILINE) is not None


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def fault_of_link(page: Path, label: str, target: str, heading: str) -> str:
    """Return the fault of a link, "" if there is none. A label in code style has names that the linked file defines."""
    file = page.parent / target if target else page
    if not file.exists():
        return f"{target} does not exist"
    if heading and heading not in headings(file):
        return f"{target}#{heading} does not exist"
    if file.suffix != ".py":
        return ""
    names = [name for name in re.findall(r"`([\w.]+)`", label) if not name.endswith(".py")]
    text = file.read_text(encoding="utf-8")
    unknown = [part for name in names for part in name.split(".") if not defines(text, part)]
    return f"{target} does not define {', '.join(unknown)}" if unknown else ""


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_that_define_the_names_of_their_labels(page: str) -> None:
    file = REPOSITORY / page
    links = re.findall(r"\[([^\]]*)\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", file.read_text(encoding="utf-8"))
    assert links or page.startswith("examples/") or page == "docs/consuming-protocol.md"
    assert list(filter(None, (fault_of_link(file, *link) for link in links))) == []


@pytest.mark.parametrize("page", PAGES)
def test_files_and_folders_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`([\w./-]+/[\w.]*)`", (REPOSITORY / page).read_text(encoding="utf-8"))
    ours = {path for path in named if path.split("/")[0] in FOLDERS}
    roots = REPOSITORY, REPOSITORY / "tests"
    assert {path for path in ours if not any((root / path).exists() for root in roots)} == set()


@cache
def names_of_tests() -> dict[str, set[str]]:
    """Return the names that the test files of each name define."""
    found: dict[str, set[str]] = {}
    for file in (REPOSITORY / "tests").rglob("*.py"):
        defined = re.findall(r"^ *(?:async def|def|class) (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
        found.setdefault(file.name, set()).update(defined)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_are_named_exist(page: str) -> None:
    """As `test_file.py::test_name`, or `…::test_name` for another test of the same file."""
    missing, file = list[str](), ""
    for named, test in re.findall(r"`([\w/]*\.py|…)::(\w+)", (REPOSITORY / page).read_text(encoding="utf-8")):
        file = file if named == "…" else named.rpartition("/")[2]
        if test not in names_of_tests().get(file, set()):
            missing.append(f"{file}::{test}")
    assert missing == []


def test_the_map_names_every_folder_of_code() -> None:
    assert FOLDERS - set(re.findall(r"^\| \[`(\w+)/`\]", MAP, re.MULTILINE)) == {"docs", "examples"}
