"""What the repository builds and installs: all of its packages, and nothing beside the namespace `headrace`."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]


def subpackages(package: str, folder: str) -> set[str]:
    modules = (path.relative_to(ROOT / folder).parent for path in (ROOT / folder).rglob("*.py"))
    return {".".join((package, *parent.parts)) for parent in modules}


def test_every_folder_with_modules_is_a_declared_package():
    found = {name for package, folder in FOLDERS.items() for name in subpackages(package, folder)}
    assert found == set(SETUPTOOLS["packages"])


@pytest.mark.parametrize("folder", FOLDERS.values())
def test_every_package_declares_its_types(folder: str):
    assert (ROOT / folder / "py.typed").is_file()


def test_installing_adds_nothing_beside_the_namespace():
    installed = importlib.metadata.files("headrace") or []
    beside = {path.parts[0] for path in installed} - {"headrace", ".."}
    assert {name for name in beside if not name.startswith(("headrace-", "__editable__", "__pycache__"))} == set()


def test_only_the_command_is_installed_outside_of_site_packages():
    installed = importlib.metadata.files("headrace") or []
    assert {path.name for path in installed if path.parts[0] == ".."} == {"headrace"}
