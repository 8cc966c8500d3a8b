"""Install the wheel on each Python of this machine that it is for, and try it: `make wheels`, or
`python -m tests.wheels WHEEL`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

OLDEST = (3, 11)
CORE = frozenset(
    {
        "anyio", "click", "greenlet", "grpcio", "grpcio-health-checking",
        "grpcio-reflection", "h11", "headrace", "idna", "lmdb", "markdown-it-py", "mdurl", "msgspec",
        "prometheus-client", "protobuf", "pygments", "rich", "sqlalchemy", "starlette", "typing-extensions",
        "uhashring", "uvicorn", "watchfiles",
    }
)  # fmt: skip
"""What `pip install headrace` installs. A new dependency is added here on purpose."""
SMOKE = """
import asyncio, sys
import headrace

async def main():
    handled = []

    async def handle(event):
        handled.append(event.payload)

    async with headrace.Provider.open(sys.argv[1]) as provider:
        orders = await provider.subscribe("smoke", "orders/*", handle, start="earliest")
        await provider.stream("orders", "1").publish(b"paid")
        await orders.caught_up()
    assert handled == [b"paid"], handled

asyncio.run(main())
print(headrace.__version__)
"""


def interpreters() -> Mapping[str, Path]:
    """Return a Python of each minor version from the oldest on, of PATH and of pyenv, by version."""
    found: dict[tuple[int, int], Path] = {}
    for program in _programs():
        ask = "import json, sys; print(json.dumps(sys.version_info[:2]))"
        answer = subprocess.run([program, "-Ic", ask], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            major, minor = json.loads(answer.stdout)
            found.setdefault((major, minor), program)
    return {f"{major}.{minor}": found[major, minor] for major, minor in sorted(found) if (major, minor) >= OLDEST}


def _programs() -> Iterator[Path]:
    roots = {Path.home() / ".pyenv", Path(os.environ.get("PYENV_ROOT", "/root/.pyenv"))}
    yield Path(sys.executable)
    for root in sorted(roots):
        yield from sorted((root / "versions").glob("3.*/bin/python"))
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        yield from sorted(path for path in folder.glob("python3.*") if re.fullmatch(r"python3\.\d+", path.name))


def distributions_after_install(wheel: Path, python: Path, folder: Path) -> set[str]:
    """Install the wheel alone into a new environment, try it, and return the names of the installed distributions.

    Raises CalledProcessError if a step fails.
    """
    environment = folder / "environment"
    uv = [sys.executable, "-m", "uv", "--quiet", "--no-config"]
    _run([*uv, "venv", "--python", str(python), str(environment)])
    own = environment / "bin" / "python"
    _run([*uv, "pip", "install", "--python", str(own), str(wheel)])
    version = wheel.name.split("-")[1]
    assert _run([str(own), "-Ic", SMOKE, str(folder / "data")]) == f"{version}\n"
    assert _run([str(environment / "bin" / "headrace"), "--version"]) == f"headrace, version {version}\n"
    listed = json.loads(_run([*uv, "pip", "list", "--format", "json", "--python", str(own)]))
    return {re.sub(r"[-_.]+", "-", each["name"]).lower() for each in listed}


def _run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def main(wheel: Path) -> int:
    """Try the wheel on each interpreter, print the results, and return the exit code."""
    failed = False
    for version, python in interpreters().items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                installed = frozenset(distributions_after_install(wheel, python, Path(folder)))
                problem = f"installs other distributions: {sorted(installed ^ CORE)}" if installed != CORE else ""
            except (subprocess.CalledProcessError, AssertionError) as error:
                problem = str(error)
        failed = failed or bool(problem)
        print(f"Python {version} ({python}): {problem or 'passed'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
