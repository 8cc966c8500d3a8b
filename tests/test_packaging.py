"""What the repository builds and installs: all of its packages, and beside the namespace `headrace` one module."""

import importlib
import importlib.metadata
import importlib.resources
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import headrace
from tests.wheels import CORE, OLDEST

ROOT = Path(__file__).parent.parent
NOT_INSTALLED = {"front_door", "benchmarks", "tests", "website", "docs", "examples", "build", "dist"}
"""Of these `front_door` is the package `headrace` itself."""


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


def test_installing_adds_one_module_beside_the_namespace():
    installed = importlib.metadata.files("headrace") or []
    beside = {path.parts[0] for path in installed} - {"headrace", ".."}
    own = {name for name in beside if not name.startswith(("headrace-", "__editable__", "__pycache__"))}
    assert own <= {"pyspark_headrace.py"}


def test_the_module_by_which_spark_finds_the_format_is_where_spark_looks_for_it():
    script = "import pkgutil; print(*(module.name for module in pkgutil.iter_modules()))"
    found = subprocess.run([sys.executable, "-Pc", script], capture_output=True, text=True, check=True).stdout.split()
    assert "pyspark_headrace" in found


def test_the_files_of_the_dashboard_are_installed_and_refer_only_to_each_other():
    static = importlib.resources.files("headrace.silo.dashboard") / "static"
    names = {file.name for file in static.iterdir()}
    assert names == {path.name for path in (ROOT / "silo" / "dashboard" / "static").iterdir()}
    used = {"index.html"}
    for name in sorted(names):
        text = (static / name).read_text(encoding="utf-8")
        used.update(re.findall(r"""(?:static/|from "\./)([\w.-]+\.(?:js|css|svg))""", text))
        assert not re.findall(r"""(?:src|href|url|import|from)[=( ]*["']?(?:https?:)?//""", text)
    assert used == names


def test_only_the_command_is_installed_outside_of_site_packages():
    installed = importlib.metadata.files("headrace") or []
    assert {path.name for path in installed if path.parts[0] == ".."} == {"headrace"}


def test_everything_that_the_package_imports_at_once_is_among_its_dependencies():
    """SQLAlchemy 2.1 brings greenlet, which its asyncio part imports, only as an extra."""
    needed = [one for one in importlib.metadata.requires("headrace") or () if "extra ==" not in one]
    assert any(one.startswith("sqlalchemy[asyncio]") for one in needed), needed


def required(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """The distributions that one needs, itself included, as they are installed here."""
    found = {name}
    for text in importlib.metadata.requires(name) or ():
        one = Requirement(text)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            found |= required(re.sub(r"[-_.]+", "-", one.name).lower(), frozenset(one.extras))
    return found


def test_installing_headrace_installs_what_the_core_needs_and_nothing_else():
    assert required("headrace") == CORE


def test_the_version_is_the_same_everywhere():
    version = importlib.metadata.version("headrace")
    assert headrace.__version__ == version
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"newTag: {version}\n" in (ROOT / "deploy/kubernetes/base/kustomization.yaml").read_text(encoding="utf-8")


def test_the_classifiers_name_the_oldest_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r":: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    assert named[0] == ".".join(map(str, OLDEST)) == project["requires-python"].removeprefix(">=")
