"""What the commands of `headrace pipeline` have in common: a quiet Spark session, and errors in one line."""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from pyspark.errors import PySparkException

from ...silo.commands.options import Place, Server, check_exists
from ...silo.outcome import Failed, Interrupted
from ...streams.errors import HeadraceError, error_of
from ...streams.subscriptions import Selector
from ..session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LINE = re.compile(r"^(?:Caused by: )?(?:[\w.]+\.)?(\w+): (.+)$", re.MULTILINE)
_CONDITION = re.compile(r"^\[([A-Z0-9_.]+)\]")


def spark_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--master` and `--spark-log`, handed to the command as `master` and `spark_log`: see `spark_session`."""

    @click.option(
        "--master", metavar="URL", help="Where Spark runs.  [default: as Spark was told, else local[*], this machine]"
    )
    @click.option(
        "--spark-log", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="Append to it what Spark says.  [default: nowhere]",
    )  # fmt: skip
    @functools.wraps(command)
    def with_spark(*args: Any, **options: Any) -> Any:
        return command(*args, **options)

    return with_spark


def options_of(place: Place) -> dict[str, Any]:
    """What the command line was told of a place, as options of the format `headrace`."""
    if not isinstance(place, Server):
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


def options_to_read(place: Place) -> dict[str, Any]:
    """The same, for a provider that has to be there: said before Spark has started, which takes its time."""
    if not isinstance(place, Server):
        check_exists(place)
    return options_of(place)


def selecting(pattern: str) -> dict[str, Any]:
    """A selector's text, `namespace/key`, as options of the source. Raises InvalidArgument."""
    namespace, _, key = Selector(pattern).pattern.partition("/")
    return {"namespace": namespace, "key": key}


@contextmanager
def spark_session(name: str, master: str | None, spark_log: Path | None) -> Generator[SparkSession]:
    """A Spark session, for the length of a `with`. What Spark prints goes to `spark_log` alone; an error of headrace
    in one of its processes is raised as that error. SIGINT and SIGTERM raise Interrupted."""
    terminated = signal.signal(signal.SIGTERM, _terminated)
    try:
        with _diverted(spark_log):
            try:
                spark = session(name, master)
                yield spark
                spark.stop()
            except PySparkException as error:
                raise told(error) or _unexpected(error, spark_log) from None
            except KeyboardInterrupt:
                raise Interrupted("interrupted") from None  # click would print an empty line for the other
    finally:
        signal.signal(signal.SIGTERM, terminated)


def told(error: PySparkException) -> HeadraceError | None:
    """The error of headrace that one of Spark's processes raised. It comes as text only, within a traceback."""
    kinds = {kind.__name__: kind for kind in _tree(HeadraceError)}
    found = [match for match in _LINE.finditer(str(error)) if match[1] in kinds]
    return error_of(kinds[found[-1][1]].code, found[-1][2]) if found else None


def _tree(kind: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _tree(child))]


def _unexpected(error: PySparkException, spark_log: Path | None) -> Failed:
    causes = [match[0].removeprefix("Caused by: ") for match in _LINE.finditer(str(error))]
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    cause = f" ({causes[-1]})" if causes and causes[-1] not in first else ""
    where = f"{spark_log} has more" if spark_log else "--spark-log FILE keeps what it says"
    return Failed(f"Spark failed: {first[:500]}{cause[:500]}: {where}")


def _terminated(_number: int, _frame: object) -> NoReturn:
    raise Interrupted("interrupted")


@contextmanager
def _diverted(log: Path | None) -> Generator[None]:
    """What this process's children print, which inherit the descriptors, and what is logged goes to a file; what Python
    code here writes to `sys.stderr` still goes where it went."""
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
    """Print what a job did: one JSON document, or a line for people."""
    from ...silo.commands.output import print_json  # noqa: PLC0415 (after Spark has ended)

    if as_json:
        print_json(document)
    else:
        click.echo(text)
