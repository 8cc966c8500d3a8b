"""`headrace init`."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path

import click

from ...streams.outcomes import CommandFailed
from ...streams.wording import printable
from .help import SectionedCommand
from .output import json_option, note, print_json

TEMPLATE = "headrace.cli.template"
SUFFIX = ".txt"
"""End of the names of the template's files, so that no tool takes them for code of headrace."""


@click.command("init", cls=SectionedCommand)
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path, file_okay=False), default=".")
@json_option
def command(*, folder: Path, as_json: bool) -> None:
    """Create a project in DIR, by default the working directory: handlers, settings, a test, and a README.

    Files that exist stay as they are: if there is one of the same name, nothing is written.
    """
    contents = _contents(folder.absolute().name)
    _write(folder, contents)
    if as_json:
        print_json({"folder": str(folder), "files": list(contents)})
        return
    note(f"created {', '.join(contents)} in {str(folder)!r}")
    here = "" if folder.absolute() == Path.cwd() else f" {shlex.quote(str(folder))}"
    note(f"start the handlers with `headrace dev{here}`; README.md has the next steps")


def _contents(name: str) -> dict[str, str]:
    """Return the text of each file of the project."""
    templates = sorted(
        (file for file in files(TEMPLATE).iterdir() if file.name.endswith(SUFFIX)), key=lambda file: file.name
    )
    return {
        file.name.removesuffix(SUFFIX): file.read_text(encoding="utf-8").replace("NAME", printable(name), 1)
        for file in templates
    }


def _write(folder: Path, contents: dict[str, str]) -> None:
    """Write all files, or none if one of them exists."""
    if existing := [name for name in contents if (folder / name).exists() or (folder / name).is_symlink()]:
        raise CommandFailed(
            f"{str(folder)!r} has {', '.join(existing)} already, and nothing is overwritten: name another directory"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        try:
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise CommandFailed(
                f"{folder / name} was created by another program meanwhile: it stays as it is"
            ) from None
