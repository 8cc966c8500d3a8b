"""Collects the Markdown pages of the repository, and corrects links that would lead out of the site.

A page of `docs/` keeps its name. The few pages outside are named in `OUTSIDE`. A linked file of another kind becomes a
text file below `source/`, so that the site is complete without a network and without a repository on a server.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from .errors import SiteError

REPOSITORY = Path(__file__).parent.parent
HOME = "docs/README.md"
"""The page that lists all others. Its headings and the order of its links are the navigation of the site."""
OUTSIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "results.md",
    HOME: "index.md",
}
"""Pages with another name in the site."""

_LINK = re.compile(r"(?P<image>!?)\[(?P<label>[^\]]*)\]\((?P<target>(?![a-z]+:)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


class Section(NamedTuple):
    """A group of pages in the navigation."""

    title: str
    pages: list[str]
    """Their places in the site."""


def site_pages(repository: Path = REPOSITORY) -> dict[str, str]:
    """Return the place in the site of each Markdown page, by its path in the repository."""
    own = {f"docs/{page.name}": page.name for page in sorted((repository / "docs").glob("*.md"))}
    return own | OUTSIDE


def write_pages(target: Path, repository: Path = REPOSITORY) -> None:
    """Write all pages with corrected links, and the files that they link to, below `target`.

    Raises SiteError, which names the page and the link, if a linked file does not exist.
    """
    places = site_pages(repository)
    for page, place in places.items():
        text = (repository / page).read_text(encoding="utf-8")
        _write(target / place, _corrected(text, page, places, target, repository))


def navigation(repository: Path = REPOSITORY) -> list[Section]:
    """Return the navigation: the headings of `HOME`, each with the pages that are first linked below it.

    Raises SiteError if `HOME` does not link to a page.
    """
    places = site_pages(repository)
    unlisted = dict.fromkeys(place for page, place in places.items() if page != HOME)
    sections: list[Section] = []
    for line in (repository / HOME).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            sections.append(Section(line[3:].strip(), []))
        for link in _LINK.finditer(line):
            place = places.get(_path(HOME, link["target"]), "")
            if place in unlisted and sections:
                sections[-1].pages.append(place)
                del unlisted[place]
    if unlisted:
        raise SiteError(f"{HOME} does not link to {', '.join(sorted(unlisted))}: add a row for each page")
    return sections


def title(text: str) -> str:
    """Return the first heading of a page."""
    return next(line[2:].strip() for line in text.splitlines() if line.startswith("# "))


def _corrected(text: str, page: str, places: Mapping[str, str], target: Path, repository: Path) -> str:
    def link(found: re.Match[str]) -> str:
        path = _path(page, found["target"])
        if not (repository / path).exists():
            raise SiteError(f"{page}: the link to {found['target']} leads to no file: correct it")
        if (repository / path).is_dir():
            return found["label"]
        new = places.get(path) or _copied(path, target, repository)
        relative = os.path.relpath(new, os.path.dirname(places[page]) or ".")  # noqa: PTH120 (a path in the site)
        return f"{found['image']}[{found['label']}]({relative}{found['anchor'] or ''})"

    return "".join(part if is_code else _LINK.sub(link, part) for is_code, part in _parts(text))


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the code and the prose of a page in turns. Code in the label of a link belongs to the prose."""
    end = 0
    for code in _CODE.finditer(text):
        if code.group().startswith("`") and not code.group().startswith("```") and _in_label(text, code):
            continue
        yield False, text[end : code.start()]
        yield True, code.group()
        end = code.end()
    yield False, text[end:]


def _in_label(text: str, code: re.Match[str]) -> bool:
    line_start, line_end = text.rfind("\n", 0, code.start()) + 1, text.find("\n", code.end())
    before, after = text[line_start : code.start()], text[code.end() : line_end if line_end >= 0 else None]
    return before.rfind("[") > before.rfind("]") and "](" in after


def _path(page: str, target: str) -> str:
    """Return the path in the repository of a link's target."""
    return os.path.normpath(os.path.join(os.path.dirname(page), target))  # noqa: PTH118, PTH120 (relative)


def _copied(path: str, target: Path, repository: Path) -> str:
    """Copy a linked file into the site, and return its place."""
    place = path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.txt"
    (target / place).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(repository / path, target / place)
    return place


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
