"""`headrace repair`."""

from __future__ import annotations

from pathlib import Path

import click

from ...streams.wording import counted
from ..interrupts import interrupts_kill
from .help import CommandGroup
from .options import data_options, provider_option
from .output import json_option, note, print_json
from .running import run


@click.group("repair", cls=CommandGroup)
def command() -> None:
    """Continue after data was damaged or lost. `headrace check` tells which command is needed.

    Restore a backup instead, if there is one. Lost events stay lost: each subscription gets a gap record.
    """


@command.command(short_help="Create an empty log in place of a lost one.")
@data_options
@provider_option
@json_option
def log(*, data: Path, store: str | None, provider: str, as_json: bool) -> None:
    """Create an empty log for a provider whose log was deleted or emptied.

    Every subscription continues at the beginning of the new log, and gets a gap record. Offsets are not used again.
    First stop the processes that use the provider.
    """
    with interrupts_kill():
        from ...silo.repair import renew_log  # noqa: PLC0415 (not for --help)
    starts = run(renew_log(data, provider, store))
    if as_json:
        print_json({"provider": provider, "starts": {str(queue): offset for queue, offset in starts.items()}})
    else:
        note(f"provider {provider!r} has a new, empty log with {counted(len(starts), 'queue')}")


@command.command(short_help="Create a new control store from the logs.")
@data_options
@json_option
def control(*, data: Path, store: str | None, as_json: bool) -> None:
    """Create a control store for the logs of a data directory whose control.db is lost.

    Events stay. Subscriptions, dead letters, delayed events and tokens were in the lost store: create them again. First
    stop the processes that use the directory. If only control.db-wal is damaged, the data saved before the damage
    stays.
    """
    with interrupts_kill():
        from ...silo.repair import renew_control  # noqa: PLC0415 (not for --help)
    names, damage = run(renew_control(data, store))
    if as_json:
        print_json({"providers": names, "damage": None if damage is None else str(damage)})
        return
    if damage is not None:
        note(f"{damage}: the control store has the data that was saved before it")
    for name in names:
        note(f"provider {name!r} is known again, without subscriptions: subscribe from earliest to read its events")


@command.command(short_help="Skip the damaged records of a queue.")
@data_options
@provider_option
@click.argument("queue", type=click.IntRange(min=0))
@json_option
def queue(*, data: Path, store: str | None, provider: str, queue: int, as_json: bool) -> None:
    """Skip the damaged and missing records of QUEUE of a log, so that its subscriptions continue after them.

    The damaged events are lost. Each subscription that is not past them gets a gap record. Silos may run meanwhile.
    """
    with interrupts_kill():
        from ...silo.repair import skip_damage  # noqa: PLC0415 (not for --help)
    skipped = run(skip_damage(data, provider, queue, store))
    if as_json:
        print_json(
            {
                "queue": queue,
                "skipped": [one._asdict() for one in skipped.damages],
                "noted": skipped.noted,
                "serving": skipped.serving,
            }
        )
        return
    if not skipped.damages:
        note(f"queue {queue}: no record is damaged or missing; its end and its counts are right")
    for damage in skipped.damages:
        note(f"queue {queue}: skipped {damage.offsets} ({damage.why})")
    for name in skipped.noted:
        note(f"subscription {name!r} has a gap record")
    for name in skipped.serving:
        note(f"subscription {name!r} is served by a process, which writes the gap record when it reaches the damage")
