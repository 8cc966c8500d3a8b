"""How a silo writes its log."""

from __future__ import annotations

import logging

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class SiloFormatter(logging.Formatter):
    """Adds the ids of the current span to the first line, if tracing is on and there is one."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name of logging)
        line = super().formatMessage(record)
        trace_id = getattr(record, "otelTraceID", "")
        return f"{line} trace_id={trace_id} span_id={getattr(record, 'otelSpanID', '')}" if trace_id else line


def log_to_stderr(level: str, silo: str = "") -> None:
    """Write records from `level` on to stderr. `silo` is named in each line; "": none."""
    handler = logging.StreamHandler()
    handler.setFormatter(SiloFormatter(FORMAT.replace("%(name)s", f"{silo} %(name)s") if silo else FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
