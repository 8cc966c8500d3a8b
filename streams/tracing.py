"""Traces with OpenTelemetry, switched on by `enable_tracing`.

A published batch carries the span of its publisher in its field `trace`, so that the span of a handler becomes part of
the same trace, in whatever process it runs. `headrace.streams.spans` makes the spans. It imports OpenTelemetry, and is
itself imported only when tracing is switched on. Until then tracing costs one look at `active` for each batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import NotSupported

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from .spans import Spans

active: Spans | None = None
"""Makes the spans of this process; None while tracing is off."""


def enable_tracing(tracer_provider: TracerProvider | None = None) -> None:
    """Make spans for publishing and handling in this process from now on, and add their ids to log records.

    `tracer_provider` is one of OpenTelemetry's SDK; None: the global one. Raises NotSupported if OpenTelemetry is not
    installed. Idempotent; the last provider counts.
    """
    global active  # noqa: PLW0603 (one switch for the process)
    try:
        from .spans import Spans, add_ids_to_log_records  # noqa: PLC0415 (it imports OpenTelemetry)
    except ImportError as error:
        raise NotSupported(f"tracing needs OpenTelemetry ({error}): install headrace[otel]") from None
    active = Spans(tracer_provider)
    add_ids_to_log_records()


def disable_tracing() -> None:
    """Make no more spans. Log records keep their fields, which are empty outside of spans."""
    global active  # noqa: PLW0603
    active = None


class Instrumentor:
    """Lets the command `opentelemetry-instrument` switch tracing on. It is named in the package's entry points."""

    def instrument(self, **options: object) -> None:
        """Switch tracing on. Of the options of OpenTelemetry, `tracer_provider` counts."""
        provider = options.get("tracer_provider")
        enable_tracing(provider)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] (of the SDK's class)

    def uninstrument(self, **_: object) -> None:
        disable_tracing()
