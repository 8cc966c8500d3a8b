"""Finds the Java that Spark runs on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from ..streams.errors import NotFound

LEAST = 17
"""The oldest Java that Spark runs on."""

_ADVICE = (
    f"install Java {LEAST} or newer (Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME to its folder"
)
INSTALLED = Path("/usr/lib/jvm")
"""The folder of Debian's Javas."""
_ANSWER_TIMEOUT_S = 60


class JavaInstallation(NamedTuple):
    home: Path
    version: int
    """17 of 17.0.15; 8 of 1.8.0_412."""


def use_java(installed: Path = INSTALLED) -> JavaInstallation:
    """Find a Java and set JAVA_HOME to it: Spark's launcher looks there first. Raise NotFound."""
    found = find_java(installed)
    os.environ["JAVA_HOME"] = str(found.home)
    return found


def find_java(installed: Path = INSTALLED) -> JavaInstallation:
    """Return the Java of JAVA_HOME. If it is not set, return that of PATH, else the oldest in `installed` that is new
    enough. Raise NotFound with one line that names the package to install.
    """
    if chosen := os.environ.get("JAVA_HOME"):
        return _checked(chosen)
    on_path = shutil.which("java")
    first = inspect_java(Path(on_path)) if on_path else None
    if first and first.version >= LEAST:
        return first
    if others := [java for java in map(inspect_java, installed.glob("*/bin/java")) if java and java.version >= LEAST]:
        return min(others, key=lambda java: java.version)
    if first:
        raise NotFound(f"Spark needs Java {LEAST}, and {first.home} is Java {first.version}: {_ADVICE}")
    raise NotFound(f"Spark needs Java, and there is none on PATH or in {installed}: {_ADVICE}")


def inspect_java(program: Path) -> JavaInstallation | None:
    """Run the program `java` and return its home and version. On PATH it may be a link or a script outside of its home.

    None: it cannot be run, or is no Java.
    """
    command = (str(program), "-XshowSettings:properties", "-version")
    try:
        answer = subprocess.run(  # noqa: S603 (a program of PATH, of JAVA_HOME or of the system)
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=_ANSWER_TIMEOUT_S
        ).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    home = re.search(r"^ *java\.home = (.+)$", answer, re.MULTILINE)
    version = re.search(r"^ *java\.specification\.version = (?:1\.)?(\d+)", answer, re.MULTILINE)
    return JavaInstallation(Path(home[1]), int(version[1])) if home and version else None


def _checked(home: str) -> JavaInstallation:
    java = inspect_java(Path(home, "bin", "java"))
    if java is None:
        raise NotFound(f"JAVA_HOME={home} has no bin/java that runs: {_ADVICE}")
    if java.version < LEAST:
        raise NotFound(f"JAVA_HOME={home} is Java {java.version}, and Spark needs {LEAST}: {_ADVICE}")
    return java._replace(home=Path(home))  # the user's path: a Java 8 would name the folder of its runtime instead
