"""What metrics and traces cost: CPU and rate of publishing and handling, in rounds with each mode once.

Command: `python -m benchmarks.observability_cost [--rounds 7] [--before PYTHON]`. Each case is a process of its own:
one embedded provider with the log, which publishes and handles the events. `--before` is the Python of an environment
with another version of headrace, which joins the rounds as the mode `before`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from headrace import EventBatch, Provider, StreamId

STREAMS = [StreamId("orders", str(number)) for number in range(100)]
SCRAPE_S = 1.0
BATCH = 1000
CASES = {"batches of 1000": 10_000_000, "single events": 100_000}
MODES = ("off", "metrics", "metrics and traces", "metrics and all traces")


async def batches(provider: Provider, events: int) -> None:
    payloads = [b"x" * 100] * BATCH
    for round_ in range(events // BATCH // len(STREAMS)):
        await asyncio.gather(*(provider.publish(stream, payloads) for stream in STREAMS))
        del round_


async def singles(provider: Provider, events: int) -> None:
    async def publish(stream: StreamId) -> None:
        for _ in range(events // len(STREAMS)):
            await provider.publish(stream, b"x" * 100)

    await asyncio.gather(*map(publish, STREAMS))


async def run(case: str, mode: str, directory: str) -> dict[str, float]:
    """Run one case. Return its rate and its CPU time."""
    handled = 0

    async def handle(batch: EventBatch) -> None:
        nonlocal handled
        handled += batch.count

    events, work = CASES[case], batches if case.startswith("batches") else singles
    async with Provider.open(directory, queues=4) as provider:
        stop = observed(provider, mode)
        subscription = await provider.subscribe("s", "orders/*", handle, batch=True)
        began, cpu = time.perf_counter(), time.process_time()
        await work(provider, events)
        await subscription.caught_up()
        took, used = time.perf_counter() - began, time.process_time() - cpu
        stop()
    assert handled == events
    return {"rate": events / took, "cpu": used / events * 1e6}


def observed(provider: Provider, mode: str) -> Callable[[], None]:
    """Switch the mode on. Return the function that ends reading the metrics."""
    if "traces" in mode:
        trace(every="all" in mode)
    if "metrics" not in mode:
        return lambda: None
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415

    registry, ended = CollectorRegistry(), threading.Event()
    provider.register_metrics(registry)

    def scrape() -> None:
        while not ended.wait(SCRAPE_S):
            generate_latest(registry)

    threading.Thread(target=scrape, daemon=True).start()
    return ended.set


def trace(*, every: bool) -> None:
    """Switch traces on: as many new ones as the default allows, or `every` one."""
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult  # noqa: PLC0415

    from headrace import enable_tracing  # noqa: PLC0415

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=100_000))
    if every:
        enable_tracing(tracers, new_traces_per_s=math.inf)
    else:
        enable_tracing(tracers)


def measured(python: str, case: str, mode: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        command = (python, __file__, "--one", case, "--mode", mode, "--directory", directory)
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        ran = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
        found: dict[str, float] = json.loads(ran.stdout)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", help="the Python of an environment with another version")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(asyncio.run(run(chosen.one, chosen.mode, chosen.directory))))
        return
    modes = [*(["before"] if chosen.before else []), *MODES]
    for case in CASES:
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(chosen.rounds):
            turned = modes[number % len(modes) :] + modes[: number % len(modes)]
            rounds.append(
                {
                    mode: measured(
                        *((chosen.before, case, "off") if mode == "before" else (sys.executable, case, mode))
                    )
                    for mode in turned
                }
            )
        report(case, modes, rounds)


def report(case: str, modes: list[str], rounds: list[dict[str, dict[str, float]]]) -> None:
    """Print the medians, and the ratios to the first mode within each round."""
    print(f"\n{case}\n\n| mode | events/s | CPU s per million | CPU to the first row (lowest to highest round) |")
    print("| --- | ---: | ---: | ---: |")
    for mode in modes:
        rate, cpu = (statistics.median(one[mode][field] for one in rounds) for field in ("rate", "cpu"))
        ratios = sorted(one[mode]["cpu"] / one[modes[0]]["cpu"] for one in rounds)
        ratio = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}–{ratios[-1]:.3f})"
        print(f"| {mode} | {rate / 1000:.0f} k | {cpu:.2f} | {ratio} |")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
