"""One trace over three processes: a publisher, a silo whose handler publishes further, and a remote consumer."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.servers import free_port

PATIENCE_S = 60

TRACING = """
import sys

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from headrace import enable_tracing

provider = TracerProvider(resource=Resource({"service.name": NAME}))
spans = open(f"{NAME}.spans", "w", buffering=1)
provider.add_span_processor(
    SimpleSpanProcessor(ConsoleSpanExporter(out=spans, formatter=lambda span: span.to_json(indent=None) + "\\n"))
)
enable_tracing(provider)
"""

HANDLERS = """
NAME = "silo"
{tracing}
from headrace import Client, StreamId, subscription

clients = []


@subscription("forward", "orders/*", start="earliest")
async def forward(event):
    if not clients:
        client = Client("{address}")
        await client.__aenter__()
        clients.append(client)
    await clients[0].publish(StreamId("invoices", event.stream.key), event.payload)
"""

PUBLISHER = """
NAME = "publisher"
{tracing}
import asyncio

from headrace import Client, StreamId


async def main():
    async with Client("{address}") as client:
        with provider.get_tracer("shop").start_as_current_span("checkout"):
            await client.publish(StreamId("orders", "42"), [b"one", b"two"])


asyncio.run(main())
"""

CONSUMER = """
NAME = "consumer"
{tracing}
import asyncio

from headrace import Client


async def main():
    handled = []

    async def bill(event):
        handled.append(event.payload)

    async with Client("{address}") as client:
        await client.subscribe("bill", "invoices/*", bill, start="earliest")
        while len(handled) < 2:
            await asyncio.sleep(0.05)


asyncio.run(main())
"""

SILO = """
modules = ["handlers"]
data = "data"

[grpc]
port = {port}

[providers.default]
queues = 2
"""


def spans_of(directory: Path, name: str) -> list[dict[str, Any]]:
    path = directory / f"{name}.spans"
    return [msgspec.json.decode(line) for line in path.read_text().splitlines()] if path.exists() else []


async def started(directory: Path, *command: str | Path) -> asyncio.subprocess.Process:
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    return await asyncio.create_subprocess_exec(
        *command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


async def until_ended(process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()


def only(spans: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = [span for span in spans if span["name"] == name]
    return found


@pytest.mark.long
async def test_a_trace_leads_from_a_publisher_over_a_silo_to_a_remote_consumer(tmp_path: Path) -> None:
    port = free_port()
    values = {"tracing": TRACING, "address": f"127.0.0.1:{port}"}
    for name, text in (("handlers", HANDLERS), ("publisher", PUBLISHER), ("consumer", CONSUMER)):
        (tmp_path / f"{name}.py").write_text(text.replace("{tracing}", TRACING).replace("{address}", values["address"]))
    (tmp_path / "silo.toml").write_text(SILO.replace("{port}", str(port)))
    silo = await started(tmp_path, Path(sys.executable).with_name("headrace"), "silo", "silo.toml")
    try:
        await until_ended(await started(tmp_path, sys.executable, "publisher.py"))
        await until_ended(await started(tmp_path, sys.executable, "consumer.py"))
    finally:
        silo.terminate()
        await silo.communicate()
    publisher, forwarded = spans_of(tmp_path, "publisher"), spans_of(tmp_path, "silo")
    billed = [span for span in spans_of(tmp_path, "consumer") if span["name"] == "process default"]
    checkout, send = only(publisher, "checkout"), only(publisher, "send default")
    process = only(forwarded, "process default")
    assert send["parent_id"] == checkout["context"]["span_id"]
    assert process["parent_id"] == send["context"]["span_id"]
    sends = {span["context"]["span_id"] for span in forwarded if span["name"] == "send default"}
    assert {span["parent_id"] for span in billed} == sends
    assert len(sends) == 2
    every = [checkout, send, process, *billed, *(span for span in forwarded if span["name"] == "send default")]
    assert {span["context"]["trace_id"] for span in every} == {checkout["context"]["trace_id"]}
