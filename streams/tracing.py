"""Traces with OpenTelemetry, switched on by `enable_tracing`.

A published batch carries the span of its publisher in its field `trace`, so that the span of a handler becomes part of
the same trace, in whatever process it runs. `headrace.streams.spans` makes the spans. It imports OpenTelemetry, and is
itself imported only when tracing is switched on. Until then tracing costs one look at `active` for each batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arguments import refused
from .errors import NotSupported

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from .spans import Spans

active: Spans | None = None
"""Makes the spans of this process; None while tracing is off."""


NEW_TRACES_PER_S = 50.0


def enable_tracing(
    tracer_provider: TracerProvider | None = None, *, new_traces_per_s: float = NEW_TRACES_PER_S
) -> None:
    """Make spans for publishing and handling in this process from now on, and add their ids to log records.

    `tracer_provider` is one of OpenTelemetry's SDK; None: the global one. If there is no trace yet,
    `new_traces_per_s` begin in a second on average, and as many at once, so that tracing costs a busy process little;
    0: none; `math.inf`: all. A publish within a recorded span of yours, and the handlers of its events, always have
    their spans. Raises NotSupported if OpenTelemetry is not installed, InvalidArgument for other values. Idempotent;
    the last call counts.
    """
    global active  # noqa: PLW0603 (one switch for the process)
    if type(new_traces_per_s) not in (int, float) or not new_traces_per_s >= 0:
        raise refused("new_traces_per_s", new_traces_per_s, "a number of at least 0")
    if tracer_provider is not None and not hasattr(tracer_provider, "get_tracer"):
        raise refused("tracer_provider", tracer_provider, "a TracerProvider of OpenTelemetry, or None")
    try:
        from .spans import Spans, add_ids_to_log_records  # noqa: PLC0415 (it imports OpenTelemetry)
    except ImportError as error:
        raise NotSupported(f"tracing needs OpenTelemetry ({error}): install headrace[otel]") from None
    active = Spans(tracer_provider, new_traces_per_s)
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
