"""A standalone Spark cluster of this machine: a master and workers of one core each, and programs submitted to it."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyspark
from packaging.requirements import Requirement

import headrace.streams
import pyspark_headrace
from benchmarks.servers import LOOPBACK, Server, free_port, java_home
from tests.spark.processes import JAVA_OPTIONS, START_SOON

SPARK_HOME = Path(pyspark.__file__).parent
SUBMIT_WITHIN_S = 240
_WORKER = "org.apache.spark.deploy.worker.Worker"
_MASTER = "org.apache.spark.deploy.master.Master"


class Daemon(Server):
    """One of Spark's own servers, in its wheel's jars."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        super().__init__(directory)

    def environment(self) -> Mapping[str, str]:
        core = next(SPARK_HOME.glob("jars/spark-core_*.jar")).name
        return {
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": LOOPBACK,
            "SPARK_SCALA_VERSION": core.removeprefix("spark-core_").partition("-")[0],  # as load-spark-env.sh says it
        }

    def java(self, *arguments: str) -> Sequence[str]:
        return (str(java_home() / "bin" / "java"), *START_SOON, "-cp", f"{SPARK_HOME}/jars/*", *arguments)


class Master(Daemon):
    name = "spark-master"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._web_port = free_port()

    @property
    def url(self) -> str:
        return f"spark://{self.address}"

    def command(self) -> Sequence[str]:
        ports = ("--port", str(self.port), "--webui-port", str(self._web_port))
        return self.java(_MASTER, "--host", LOOPBACK, *ports)

    def ping(self) -> bool:
        return self.workers() >= 0

    def workers(self) -> int:
        """Return the number of workers, or -1 while the master cannot tell."""
        with urllib.request.urlopen(f"http://{LOOPBACK}:{self._web_port}/json/", timeout=5) as answer:
            text = answer.read()
        return int(json.loads(text)["aliveworkers"]) if text.startswith(b"{") else -1  # its web pages come first


class Worker(Daemon):
    """Has one core. `start` waits until the master has `expected` workers, so that several can start at once."""

    name = "spark-worker"

    def __init__(self, directory: Path, master: Master, expected: int) -> None:
        super().__init__(directory)
        self._master = master
        self._expected = expected

    def command(self) -> Sequence[str]:
        resources = ("--cores", "1", "--memory", "1g", "--work-dir", str(self.directory / "work"))
        where = ("--host", LOOPBACK, "--port", str(self.port), "--webui-port", "0")
        return self.java(_WORKER, *where, *resources, self._master.url)

    def ping(self) -> bool:
        return self._master.workers() >= self._expected


def submit(script: Path, master: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `spark-submit` to its end, in the script's folder: that of the tests is no folder to import from."""
    settings = {
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.ui.enabled": "false",
        "spark.executor.memory": "512m",
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
        # Both executors, before the first task.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    }
    set_them = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
    return subprocess.run(
        [str(SPARK_HOME / "bin" / "spark-submit"), "--master", master, *set_them, *options, str(script)],
        check=False,
        cwd=script.parent,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SUBMIT_WITHIN_S,
    )


def pack(archive: Path) -> None:
    """Make an archive of the files that `pip install --target FOLDER headrace` brings: headrace and its dependencies.

    Spark's own pyarrow and numpy are not in it.
    """
    folder = Path(headrace.streams.__file__).parent.parent
    with zipfile.ZipFile(archive, "w") as packed:
        for path in _files_of(folder):
            packed.write(path, path.relative_to(folder.parent))
        packed.write(pyspark_headrace.__file__, "pyspark_headrace.py")
        for name in _needed_by("headrace"):
            for file in importlib.metadata.files(name) or ():
                if ".." not in file.parts and file.suffix != ".pyc":
                    packed.write(Path(str(file.locate())), file.as_posix())


def _files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, also behind links: the package may be the repository instead of a wheel."""
    for parent, _, names in os.walk(folder, followlinks=True):
        yield from (Path(parent, name) for name in names if not name.endswith(".pyc"))


def _needed_by(name: str) -> set[str]:
    found: set[str] = set()
    for line in importlib.metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            normal = re.sub(r"[-_.]+", "-", requirement.name).lower()
            found |= {normal} | _needed_by(normal)
    return found
