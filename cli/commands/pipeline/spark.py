"""The common part of the commands of `headrace pipeline`: a quiet Spark session, and errors in one line."""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ....streams.outcomes import CommandFailed, CommandInterrupted
from ...interrupts import interrupts_kill
from ..help import SectionedOption
from ..options import ProviderPlace, SiloPlace, check_exists
from ..output import print_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OF_SPARK = ("pyspark", "py4j", "pyarrow", "numpy")

_spark_option = functools.partial(click.option, cls=SectionedOption, section="Spark")


@contextmanager
def spark_needed() -> Generator[None]:
    """Import modules that need Spark in a `with`. If Spark is missing, CommandFailed names the extra."""
    try:
        with interrupts_kill():
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OF_SPARK:
            raise
        raise CommandFailed(
            f"headrace pipeline needs Spark, and {error.name} is missing: install headrace[spark]"
        ) from None


def spark_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--master` and `--spark-log`, handed to the command as `master` and `spark_log`: see `spark_session`."""

    @_spark_option(
        "--master",
        metavar="URL",
        help="Master of Spark.  [default: of Spark's settings, else local[*], this machine]",
    )
    @_spark_option(
        "--spark-log", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="Append the output of Spark to FILE.  [default: discarded]",
    )  # fmt: skip
    @functools.wraps(command)
    def with_spark(*args: Any, **options: Any) -> Any:
        return command(*args, **options)

    return with_spark


def options_of(place: ProviderPlace) -> dict[str, Any]:
    """Return the options of the format `headrace` for a provider of the command line."""
    if not isinstance(place, SiloPlace):
        return {"data": str(place.data), "provider": place.provider}
    options: dict[str, Any] = {
        "server": place.address,
        "provider": place.provider,
        "insecure": str(place.insecure).lower(),
    }
    if place.token is not None:
        options["token"] = place.token
    if place.tls is not None:
        options |= {"tls": "true"} | {f"tls{name.capitalize()}": str(file) for name, file in place.tls.items()}
    return options


def options_to_read(place: ProviderPlace) -> dict[str, Any]:
    """Return the same for a provider that must exist. Raise NotFound now, because starting Spark takes long."""
    if not isinstance(place, SiloPlace):
        check_exists(place)
    return options_of(place)


@contextmanager
def spark_session(name: str, master: str | None, spark_log: Path | None) -> Generator[SparkSession]:
    """Start a Spark session, for the length of a `with`. The output of Spark goes only to `spark_log`. An error of
    headrace in one of Spark's processes is raised as that error. SIGINT and SIGTERM raise Interrupted."""
    with spark_needed():
        from ....pipeline.jobs.failures import SPARK_ERRORS, headrace_error  # noqa: PLC0415 (not for --help)
        from ....pipeline.session import session  # noqa: PLC0415
    terminated = signal.signal(signal.SIGTERM, _terminated)
    try:
        with _diverted(spark_log):
            try:
                spark = session(name, master)
                yield spark
                spark.stop()
            except SPARK_ERRORS as error:
                raise headrace_error(error) or _unexpected(error, spark_log) from None
            except KeyboardInterrupt:
                raise CommandInterrupted(
                    "interrupted"
                ) from None  # click would print an empty line for KeyboardInterrupt
    finally:
        signal.signal(signal.SIGTERM, terminated)


def _unexpected(error: Exception, spark_log: Path | None) -> CommandFailed:
    from ....pipeline.jobs.failures import ERROR_LINE, spark_message  # noqa: PLC0415 (its caller has imported it)

    causes = [match[0].removeprefix("Caused by: ") for match in ERROR_LINE.finditer(str(error))]
    first = next(iter(spark_message(error).strip().splitlines()), type(error).__name__)
    cause = f" ({causes[-1]})" if causes and causes[-1] not in first else ""
    where = f"{spark_log} has more" if spark_log else "--spark-log FILE keeps its output"
    return CommandFailed(f"Spark failed: {first[:500]}{cause[:500]}: {where}")


def _terminated(_number: int, _frame: object) -> NoReturn:
    raise CommandInterrupted("interrupted")


@contextmanager
def _diverted(log: Path | None) -> Generator[None]:
    """Write the output of child processes, which inherit the descriptors, and the log to a file. Python code of this
    process still writes to the former `sys.stderr`."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept_out, kept_err, stderr = os.dup(1), os.dup(2), sys.stderr
    target = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with os.fdopen(os.dup(2), "w", buffering=1, encoding=stderr.encoding, errors="backslashreplace") as shown:
        for descriptor in (1, 2):
            os.dup2(target, descriptor)
        sys.stderr = shown
        logged = logging.StreamHandler(os.fdopen(os.dup(target), "w", encoding="utf-8"))
        logging.getLogger().addHandler(logged)  # PySpark logs each interrupt, with a traceback
        try:
            yield
        finally:
            logging.getLogger().removeHandler(logged)
            logged.stream.close()
            sys.stderr = stderr
            for kept, descriptor in ((kept_out, 1), (kept_err, 2)):
                os.dup2(kept, descriptor)
                os.close(kept)
            os.close(target)


def report(document: Mapping[str, Any], as_json: bool, text: str) -> None:
    """Print the result of a job: one JSON document, or a line for people."""
    if as_json:
        print_json(document)
    else:
        click.echo(text)
