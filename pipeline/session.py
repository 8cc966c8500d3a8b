"""Spark sessions for jobs, examples and the command line."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .java import use_java

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

_SETTINGS = {
    # Over TCP every task of a Python source waits 40 ms for an acknowledgement that comes late.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
_LOCAL_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
_AT_START = {"spark.ui.showConsoleProgress": "false"}
"""Settings that must be given before the JVM starts: Spark's launcher sets other values."""


def session(name: str, master: str | None = None) -> SparkSession:
    """Return the Spark session of this process, or start one with settings that suit streams.

    Settings of `spark-submit`, spark-defaults.conf, PYSPARK_SUBMIT_ARGS, PYSPARK_PYTHON and SPARK_REMOTE stay. `master`
    is the URL of Spark's master: by default the one of these settings, else all cores of this machine. Raise NotFound
    if there is no Java.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 (of the extra `spark`)

    if active := SparkSession.getActiveSession():
        return active
    if "SPARK_REMOTE" in os.environ:  # the server there has Java, and settings of its own
        return SparkSession.builder.appName(name).getOrCreate()
    known = _start_java()
    where = master or known.get("spark.master", "local[*]") or ""
    local = where.startswith("local")
    builder = SparkSession.builder.appName(name).master(where)
    for key, value in _missing({**_SETTINGS, **(_LOCAL_SETTINGS if local else {})}, known).items():
        builder = builder.config(key, value)
    made = builder.getOrCreate()
    register_format(made)
    if local and not known.contains("spark.sql.shuffle.partitions"):
        # Spark's 200 make a micro-batch of few events take seconds.
        made.conf.set("spark.sql.shuffle.partitions", str(made.sparkContext.defaultParallelism))
    return made


def own_session(spark: SparkSession) -> SparkSession:
    """Return a session with settings of its own: the user's settings for other queries must not change the files."""
    own = spark.newSession()
    register_format(own)
    own.conf.set("spark.sql.session.timeZone", "UTC")
    own.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    return own


def register_format(session: SparkSession) -> None:
    """Register the format if Spark's search has not found it. Each new session needs this.

    The search does not see an editable installation. Spark 4.3 tests its Python with `sh -c "command -v PATH"`. If the
    path has a space, the test fails, and Spark does not search for any format.
    """
    from pyspark.sql import is_remote  # noqa: PLC0415 (of the extra `spark`)

    from .source import HeadraceSource  # noqa: PLC0415 (needs pyspark)

    if is_remote():  # the server searches, with its own Python
        return
    java: Any = session._jsparkSession  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    if java.sessionState().dataSourceManager().dataSourceExists(HeadraceSource.name()):
        return
    active = java.getActiveSession()  # Spark refuses a format that this one knows, whatever `session` knows
    java.setActiveSession(java)
    try:
        session.dataSource.register(HeadraceSource)
    finally:
        java.setActiveSession(active.get() if active.isDefined() else None)


def _start_java() -> SparkConf:
    """Start the JVM unless `spark-submit` has started it, and return Spark's settings."""
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415

    _prepare_environment()
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # `spark-submit` runs this program, in a JVM of its own
        use_java()
    start = SparkConf(loadDefaults=False).setAll(list(_AT_START.items()))
    SparkContext._ensure_initialized(conf=start)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    return SparkConf()


def _prepare_environment() -> None:
    """Set the environment variables that the JVM needs when it starts."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else Spark takes the first `python3` of PATH
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:  # without an address of this host, the JVM would end
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _missing(wanted: Mapping[str, str], known: SparkConf) -> Mapping[str, str]:
    return {key: value for key, value in wanted.items() if not known.contains(key)}
