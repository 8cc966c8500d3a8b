"""Runs Zensical over the collected pages."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from .errors import SiteError
from .pages import REPOSITORY, Section, navigation, title, write_pages
from .reference import reference_pages, reference_section

BUILT_BY = ".built-by-headrace"
"""A file that marks the directory of a build: all of it may be deleted."""
CONFIGURATION = Path(__file__).parent / "mkdocs.yml"


def build(work: Path) -> Path:
    """Build the site below `work`, and return the folder with its HTML. What was in `work` before is deleted.

    Raises SiteError if a page is broken: a link that leads nowhere is an error; and if `work` has files that are not
    those of an earlier build.
    """
    if work.exists() and any(work.iterdir()) and not (work / BUILT_BY).exists():
        raise SiteError(f"{str(work)!r} has other files, which would be deleted: name a new directory")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / BUILT_BY).touch()
    pages, html = work / "pages", work / "html"
    write_pages(pages)
    generated = reference_pages()
    for page in generated:
        (pages / page.place).parent.mkdir(parents=True, exist_ok=True)
        (pages / page.place).write_text(page.text, encoding="utf-8")
    sections = [*navigation(), reference_section(generated)]
    configuration = work / "mkdocs.yml"
    configuration.write_text(_configuration(sections, pages, html), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(configuration)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (fixed arguments)
    if done.returncode:
        # Its last output is a traceback.
        raise SiteError(re.sub(r"\x1b\[[\d;]*m", "", done.stdout) or done.stderr)
    return html


def _configuration(sections: list[Section], pages: Path, html: Path) -> str:
    titled = [{"Home": "index.md"}]
    nav: list[object] = [
        *titled,
        *({one.title: [{title((pages / place).read_text("utf-8")): place} for place in one.pages]} for one in sections),
    ]
    # JSON is YAML.
    folders = f"docs_dir: {pages.name}\nsite_dir: {html.name}\nnav: {json.dumps(nav)}\n"
    return CONFIGURATION.read_text(encoding="utf-8") + folders


__all__ = ("REPOSITORY", "build")
