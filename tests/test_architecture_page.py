"""docs/architecture.md names folders, files, functions, tests and headings that exist."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.plain_english import NOT_OURS, REPOSITORY

PAGE = REPOSITORY / "docs" / "architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")
FOLDERS = {path.name for path in REPOSITORY.iterdir() if path.is_dir() and "." not in path.name} - NOT_OURS


class Link(NamedTuple):
    label: str
    target: str
    """Path of a file or folder from the page; "" for the page itself."""
    heading: str


LINKS = sorted({Link(*found) for found in re.findall(r"\[([^\]]*)\]\(([^)#]*)#?([^)]*)\)", TEXT)})
NAMED = sorted({path for path in re.findall(r"`([\w./]+/[\w.]*)`", TEXT) if path.split("/")[0] in FOLDERS})


def defines(module: str, name: str) -> bool:
    """Whether a module defines a class, a function, an attribute or a constant of this name."""
    return re.search(rf"^\s*(?:(?:async )?def |class |self\.)?{name}\b *[:=(]", module, re.MULTILINE) is not None


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("link", LINKS, ids=lambda link: f"{link.label}-{link.target}")
def test_a_link_leads_to_a_file_that_has_the_names_of_its_label(link: Link) -> None:
    file = PAGE.parent / link.target if link.target else PAGE
    assert file.exists(), f"docs/architecture.md links {link.target}, which does not exist"
    if file.suffix == ".py":
        names = [name for name in re.findall(r"`([\w.]+)`", link.label) if not name.endswith(".py")]
        parts = sorted({part for name in names for part in name.split(".")})
        assert [part for part in parts if not defines(file.read_text(encoding="utf-8"), part)] == []
    if link.heading:
        assert link.heading in headings(file)


@pytest.mark.parametrize("path", NAMED)
def test_a_path_that_is_named_exists(path: str) -> None:
    assert (REPOSITORY / path).exists()


def test_the_map_names_every_folder_of_code() -> None:
    assert FOLDERS - set(re.findall(r"^\| \[`(\w+)/`\]", TEXT, re.MULTILINE)) == {"docs", "examples"}
