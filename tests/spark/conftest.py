"""One Spark session for all tests that need Spark, in a JVM that ends with them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark.java_gateway
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from benchmarks.servers import java_home
from tests.spark.processes import JAVA_OPTIONS, make_home, session_members

HERE = Path(__file__).parent
LIMIT_S = 400
"""For one test: the first one starts a JVM too, and a slow machine takes a minute for that."""
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "1",
    # Plans of few rows take longer to compile than to interpret.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.unix.domain.socket.dir": "/tmp",  # a socket's path has at most 107 bytes
    "spark.sql.streaming.stopTimeout": "60s",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.spark)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture(scope="session")
def spark_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set the variables that Spark needs before its JVM starts, here and in processes that a test starts."""
    python = Path(sys.executable)
    if " " in str(python):  # Spark finds no formats with such a Python
        environment = tmp_path_factory.mktemp("python") / "environment"
        environment.symlink_to(sys.prefix)
        python = environment / "bin" / python.name
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_HOME", str(java_home()))
        patch.setenv("PYSPARK_PYTHON", str(python))
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("SPARK_HOME", str(make_home(tmp_path_factory.mktemp("spark"))))
        for variable in ("PYSPARK_SUBMIT_ARGS", "SPARK_REMOTE", "SPARK_CONF_DIR"):
            patch.delenv(variable, raising=False)
        yield


@pytest.fixture(scope="session")
def spark(spark_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session of all tests, with two cores: use views, checkpoints and directories of your own."""
    folder = tmp_path_factory.mktemp("spark")
    builder = SparkSession.builder.master("local[2]").appName("tests")
    for key, value in {**SETTINGS, "spark.sql.warehouse.dir": str(folder), "spark.local.dir": str(folder)}.items():
        builder = builder.config(key, value)
    with pytest.MonkeyPatch.context() as patch:
        started = _start_without_fork(patch)
        session = builder.getOrCreate()
    yield session
    session.stop()
    _end(started[0])


@pytest.fixture(autouse=True)
def no_query_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """A streaming query that outlives its test fails it: it would take the cores of all others."""
    yield
    if "spark" in request.fixturenames:
        session: SparkSession = request.getfixturevalue("spark")
        left = session.streams.active
        for query in left:
            query.stop()
        assert not left, f"queries left running: {[query.name or query.id for query in left]}"


def _start_without_fork(patch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Have PySpark start the JVM without a function to run in the child, for which `subprocess` has to fork: the child
    of a process that has gRPC's threads may crash. In a session of its own the JVM gets no interrupt either."""
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], *, preexec_fn: object, stdin: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, stdin=stdin, env=env, start_new_session=True))
        return started[0]

    patch.setattr(pyspark.java_gateway, "Popen", start)
    return started


def _end(java: subprocess.Popen[bytes]) -> None:
    """End the JVM, which has the Python workers with it, and let a later session start another."""
    context: Any = SparkContext  # PySpark has no public way to end its JVM
    context._gateway.shutdown()
    context._gateway = context._jvm = None
    assert java.stdin is not None
    java.stdin.close()  # its sign to end
    java.wait(60)
    assert session_members(java.pid) == [], "Spark left processes behind"
