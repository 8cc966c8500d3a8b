"""How a silo writes its log."""

from __future__ import annotations

import logging
import os
import sys

import click

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
COLOURS = {logging.DEBUG: "cyan", logging.INFO: "green", logging.WARNING: "yellow", logging.ERROR: "red"}
"""Colour of the level's name on a terminal."""


class SiloFormatter(logging.Formatter):
    """Adds the ids of the current span to the first line, if tracing is on and there is one."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name of logging)
        line = super().formatMessage(record)
        trace_id = getattr(record, "otelTraceID", "")
        return f"{line} trace_id={trace_id} span_id={getattr(record, 'otelSpanID', '')}" if trace_id else line


class ColourFormatter(SiloFormatter):
    """Writes for people: the level has a colour, and time and logger are faint."""

    def __init__(self) -> None:
        super().__init__("%(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name of logging)
        level = click.style(f"{record.levelname.lower():7}", fg=COLOURS.get(record.levelno, "red"), bold=True)
        moment = click.style(self.formatTime(record, self.datefmt), dim=True)
        return f"{moment} {level} {super().formatMessage(record)} {click.style(record.name, dim=True)}"


def log_to_stderr(level: str, silo: str = "") -> None:
    """Write records from `level` on to stderr. `silo` is named in each line; "": none.

    Without a name, the lines are coloured on a terminal, unless the variable NO_COLOR is set.
    """
    handler = logging.StreamHandler()
    if not silo and sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        handler.setFormatter(ColourFormatter())
    else:
        handler.setFormatter(SiloFormatter(FORMAT.replace("%(name)s", f"{silo} %(name)s") if silo else FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
