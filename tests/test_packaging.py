"""What the repository builds and installs: all of its packages, and nothing beside the namespace `headrace`."""

import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_INSTALLED = {"tests", "docs", "examples", "build", "dist"}


def folders_of_the_makefile() -> set[str]:
    found = re.search(r"^PACKAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    return set(found[1].split())


FOLDERS = sorted(folders_of_the_makefile())


def test_every_top_level_folder_with_modules_is_installed():
    with_modules = {path.parent.name for path in ROOT.glob("[a-z]*/*.py")}
    assert with_modules - NOT_INSTALLED == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_with_modules_is_a_package(folder: str):
    assert {
        path.parent for path in (ROOT / folder).rglob("*.py") if not (path.parent / "__init__.py").is_file()
    } == set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_package_can_be_imported_and_declares_its_types(folder: str):
    package = importlib.import_module(f"headrace.{folder}")
    assert (Path(package.__path__[0]) / "py.typed").is_file()


def test_installing_adds_nothing_beside_the_namespace():
    installed = importlib.metadata.files("headrace") or []
    beside = {path.parts[0] for path in installed} - {"headrace", ".."}
    assert {name for name in beside if not name.startswith(("headrace-", "__editable__", "__pycache__"))} == set()


def test_only_the_command_is_installed_outside_of_site_packages():
    installed = importlib.metadata.files("headrace") or []
    assert {path.name for path in installed if path.parts[0] == ".."} == {"headrace"}
