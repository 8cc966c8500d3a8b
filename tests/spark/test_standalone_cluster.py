"""A plain PySpark program, submitted to a standalone cluster of two workers."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headrace import Provider, StreamId
from tests.spark.standalone import Master, Worker, pack, submit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SETTINGS = (
    "spark.sql.session.timeZone",
    "spark.python.unix.domain.socket.enabled",
    "spark.sql.shuffle.partitions",
    "spark.app.name",
)
KEYS = 20
EACH = 5
PLAIN = 'from pyspark.sql import SparkSession; spark = SparkSession.builder.appName("plain").getOrCreate()'
OURS = 'from headrace.pipeline.session import session; spark = session("ours")'
PROGRAM = """
import json
import sys

{session}


def imported(_):
    import headrace.streams
    import grpc

    yield headrace.streams.__file__, grpc.__file__


def read(name):
    return spark.read.format("headrace").option("data", name).option("columns", "key,payload,queue").load()


read("{data}").select("key", "payload").write.format("headrace").mode("append").options(
    data="{data}", namespace="copies", staging="{staging}", txnAppId="copy", txnVersion="1"
).save()
print(json.dumps({{
    "executors": len(spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1,
    "imported": spark.sparkContext.parallelize(range(2), 2).mapPartitions(imported).collect(),
    "events": sorted([row.key, row.payload.decode()] for row in read("{data}").collect()),
    "settings": [spark.conf.get(name, None) for name in {settings}],
}}))
"""


@pytest.fixture(scope="module")
def master(spark_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("cluster")
    with Master(folder / "m") as master, Worker(folder / "w1", master, 0), Worker(folder / "w2", master, 2):
        yield master.url


@pytest.fixture
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a Spark program that begins with the test's parameter.

    It copies the published events into another namespace, and prints its observations.
    """

    async def publish() -> None:
        async with Provider.open(tmp_path / "data", queues=2) as provider:
            await provider.publish_many(
                (StreamId("orders", f"k{key}"), str(number).encode()) for key in range(KEYS) for number in range(EACH)
            )

    asyncio.run(publish())
    script = tmp_path / "program.py"
    names = {"data": tmp_path / "data", "staging": tmp_path / "staging", "settings": SETTINGS}
    script.write_text(PROGRAM.format(session=request.param, **names))
    return script


TWICE = sorted([f"k{key}", str(number)] for key in range(KEYS) for number in range(EACH) for _ in range(2))


@pytest.mark.parametrize("program", [PLAIN], indirect=True, ids=[""])
def test_executors_that_have_the_package_read_and_write(master: str, program: Path):
    ran = submit(program, master)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout)
    assert told["executors"] == 2
    assert told["events"] == TWICE


@pytest.mark.parametrize("program", [OURS], indirect=True, ids=[""])
def test_executors_get_the_package_in_an_archive(master: str, program: Path, tmp_path: Path):
    pack(tmp_path / "packages.zip")
    ran = submit(
        program,
        master,
        *("--archives", f"{tmp_path}/packages.zip#packages"),
        *("--conf", "spark.sql.session.timeZone=Europe/Berlin"),
        *("--conf", f"spark.executorEnv.PYTHONPATH=packages:{cluster_packages(tmp_path / 'cluster')}"),
        PYSPARK_DRIVER_PYTHON=sys.executable,
        PYSPARK_PYTHON=str(Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout)
    assert {path.rpartition("/packages/")[2] for paths in told["imported"] for path in paths} == {
        "headrace/streams/__init__.py",
        "grpc/__init__.py",
    }
    assert told["events"] == TWICE
    assert told["settings"] == ["Europe/Berlin", "true", None, "ours"]  # nothing that is set is changed


def cluster_packages(folder: Path) -> Path:
    """The packages that a cluster's Python has for Spark: pyarrow and numpy, and not headrace."""
    folder.mkdir()
    for module in (np, pa):
        package = Path(str(module.__file__)).parent
        for found in (package, package.with_name(f"{package.name}.libs")):
            if found.exists():
                (folder / found.name).symlink_to(found)
    return folder
