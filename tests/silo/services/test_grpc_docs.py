"""The examples of docs/grpc.md work, and its statements about errors and limits are true."""

import re
from pathlib import Path
from typing import Any

from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import Default

from headrace.server import grpc_server as server
from headrace.server import guard
from headrace.server.connection_times import CONNECTION_TIMES
from headrace.server.limits import ClientLimits
from headrace.silo.service_limits import SERVICE_LIMITS
from headrace.silo.services import publisher
from headrace.streams import errors
from headrace.streams.events import MAX_BATCH_EVENTS, MAX_EVENT_BYTES
from headrace.streams.publishing import MAX_BATCH_BYTES, MAX_REQUEST_BATCHES
from tests.silo.services.calling import Allowed as Allowing
from tests.silo.services.calling import Caller, connecting, make_tokens, opened

TEXT = (Path(__file__).parents[3] / "docs" / "grpc.md").read_text()
CALLS = re.findall(r"^ask (?:-d '([^']*)' )?(?:\\\n +)?127\.0\.0\.1:9465 (\S+)/(\w+)$", TEXT, re.MULTILINE)


async def call(caller: Caller, service: str, method: str, json: str) -> Any:
    described = Default().FindServiceByName(service).FindMethodByName(method)
    request = message_factory.GetMessageClass(described.input_type)()
    response = message_factory.GetMessageClass(described.output_type)
    json_format.Parse(json or "{}", request)
    if described.server_streaming:
        return await caller.responses(f"{service}/{method}", request).read(response)
    return await caller.ask(f"{service}/{method}", request, response)


async def test_the_documented_calls_have_the_documented_results(tmp_path: Path):
    assert len(CALLS) == TEXT.count("\nask ") == 8
    token = await make_tokens(tmp_path, everything=Allowing(["*"], ["*"], ["*"]))
    answers: dict[str, Any] = {}
    leaving = '"leave": true'
    async with opened(tmp_path, provider={"queues": 8}, auth="tokens") as silo:
        async with connecting(silo.grpc_address or "", token["everything"]) as caller:
            for json, service, method in CALLS:
                answers["leave" if leaving in json else method] = await call(caller, service, method, json)
    assert answers["CreateSubscription"].created
    ((batch,),) = [answers["Pull"].batches]
    assert batch.payload == b"paidsent"
    ((status,),) = [answers["Pull"].queues]
    assert not answers["Acknowledge"].refused
    assert not answers["leave"].batches
    assert (batch.queue, batch.offset) == (5, 0)  # as the example acknowledges
    assert (status.queue, status.epoch, status.generation) == (5, 2, 0)
    assert [each.id for each in answers["GetSubscription"].subscription.consumers] == ["c1"]
    assert [batch.payload for batch in answers["Read"].batches] == [b"paidsent"]
    assert answers["DescribeCluster"].cluster.silos[0].state == "running"


def test_the_table_of_errors_has_every_code_with_its_status():
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in TEXT.splitlines() if line.startswith("| ")]
    told: dict[str, str] = {}
    status = ""
    for first, codes, _ in rows:
        status = first or status
        told |= dict.fromkeys(re.findall(r"`([a-z_]+)`", codes), status) if status.isupper() else {}
    remote = vars(errors).values()
    kinds = [kind for kind in remote if isinstance(kind, type) and issubclass(kind, errors.HeadraceError)]
    local = {"closed", "data_directory"}  # these are of a process's own
    wanted = {kind.code: guard.failure_of(made(kind)).status.name for kind in kinds if kind.code not in local}
    assert told == wanted


def made(kind: type[errors.HeadraceError]) -> errors.HeadraceError:
    error = errors.error_of(kind.code, "text")
    assert error is not None
    return error


def test_the_numbers_are_those_of_the_code():
    times = CONNECTION_TIMES
    for number, text in (
        (MAX_EVENT_BYTES, "| payload of an event | 1 MiB |"),
        (MAX_BATCH_EVENTS, f"| events in a batch | {MAX_BATCH_EVENTS:,} |"),
        (MAX_BATCH_BYTES, "| a batch, encoded | 3 MiB |"),
        (MAX_REQUEST_BATCHES, f"| batches in a request | {MAX_REQUEST_BATCHES:,} |"),
        (SERVICE_LIMITS.stream_requests, f"{SERVICE_LIMITS.stream_requests:,} requests and 8 MiB"),
        (times.keepalive_s, f"silent for {times.keepalive_s:.0f} s"),
        (server.MIN_PING_S, f"every {server.MIN_PING_S:.0f} s"),
        (times.idle_s, f"after {times.idle_s / 60:.0f} minutes"),
        (times.handshake_s, f"within {times.handshake_s:.0f} s is closed"),
    ):
        assert text in TEXT, number
    assert (MAX_EVENT_BYTES, MAX_BATCH_BYTES, publisher.STREAM_BYTES) == (1 << 20, 3 << 20, 8 << 20)
    assert ClientLimits().message_bytes == (4 << 20) + (64 << 10)
