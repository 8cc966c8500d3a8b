"""`headrace pipeline replay`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ....streams.wording import counted
from ..help import SectionedCommand, SectionedOption
from ..options import ProviderPlace, place_options
from ..output import json_option
from ..progress import events_progress
from .spark import options_of, report, spark_needed, spark_options, spark_session

_source_option = functools.partial(click.option, cls=SectionedOption, section="Source")


def _from_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--archive`, `--from-data` or `--from-server`, with their options, handed to the command as `source`."""
    file = click.Path(path_type=Path, dir_okay=False)
    directory = click.Path(path_type=Path, file_okay=False)

    @_source_option("--archive", "archived", type=directory, metavar="DIR", help="Replay an archive.")
    @_source_option("--from-data", type=directory, metavar="DIR", help="Replay a data directory.")
    @_source_option("--from-server", metavar="HOST:PORT", help="Replay a provider of silos.")
    @_source_option("--from-provider", default="default", show_default=True, metavar="NAME", help="Provider there.")
    @_source_option(
        "--from-token", envvar="HEADRACE_FROM_TOKEN", show_envvar=True, metavar="TOKEN", help="For the silo."
    )
    @_source_option("--from-ca", type=file, metavar="FILE", help="Use TLS, and trust these certificates (PEM).")
    @_source_option("--from-certificate", type=file, metavar="FILE", help="This client's own, with --from-key.")
    @_source_option("--from-key", type=file, metavar="FILE", help="Its key.")
    @_source_option("--from-tls", is_flag=True, help="Use TLS, and trust well-known authorities.")
    @_source_option("--from-insecure", is_flag=True, help="Send the token without TLS to another machine.")
    @functools.wraps(command)
    def with_source(*args: Any, archived: Path | None, **given: Any) -> Any:
        said = {name: given.pop(name) for name in list(given) if name.startswith("from_")}
        return command(*args, source=_source(archived, {name[5:]: each for name, each in said.items()}), **given)

    return with_source


def _source(archived: Path | None, said: dict[str, Any]) -> Path | dict[str, object]:
    if sum(each is not None for each in (archived, said["data"], said["server"])) != 1:
        raise click.UsageError("give one of --archive, --from-data and --from-server: the source of the replay")
    if archived is not None:
        return archived
    names = {"ca": "tlsCa", "certificate": "tlsCertificate", "key": "tlsKey"}
    return {names.get(name, name): each for name, each in said.items() if each}


class _Time(click.ParamType[datetime]):
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a time such as 2026-11-21T10:00", param, ctx)
        return when if when.tzinfo else when.replace(tzinfo=UTC)


@click.command("replay", cls=SectionedCommand)
@_from_options
@place_options
@click.option(
    "--staging",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="For its progress; required with --server.",
)
@click.option("--streams", default="*/*", show_default=True, metavar="PATTERN", help="Streams, as namespace/key.")
@click.option("--since", type=_Time(), metavar="TIME", help="Events with this timestamp or a later one (UTC).")
@click.option("--until", type=_Time(), metavar="TIME", help="Events with an earlier timestamp than this (UTC).")
@click.option("--to-namespace", metavar="NAME", help="Publish to it.  [default: the same]")
@click.option("--speed", type=float, metavar="X", help="X times the speed of the timestamps.")
@click.option("--rate", type=float, metavar="N", help="N events per second.  [default: as fast as possible]")
@click.option("--id", "name", metavar="NAME", help="Name of the replay: a replay with a name is done once for ever.")
@spark_options
@json_option
def command(
    *, source: Path | dict[str, object], place: ProviderPlace, staging: Path | None,
    master: str | None, spark_log: Path | None, as_json: bool, **how: Any,
) -> None:  # fmt: skip
    """Publish the events of an archive or a provider again, to --data or --server.

    Streams, their order, timestamps, ids and headers stay. If it ends early, the same command goes on, and each event
    is published once.
    """
    with spark_needed():
        from ....pipeline.jobs.replay import replay  # noqa: PLC0415 (not for --help)
    how |= options_of(place) | ({} if staging is None else {"staging": str(staging)})
    with spark_session("headrace replay", master, spark_log) as spark, events_progress("replaying") as progress:
        done = replay(spark, source, progress=progress, **how)
    text = f"replayed {counted(done.events, 'event')}"
    report(done._asdict(), as_json, text if done.events == done.total else f"{text}, {done.total:,} in all")
