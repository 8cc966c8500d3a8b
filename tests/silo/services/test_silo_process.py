"""gRPC of a silo that is a process of its own: started, told to stop, and killed."""

import queue
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from headrace.proto.v1.publisher_pb2 import ProducerSequence, PublishStreamRequest, PublishStreamResponse
from tests.cli.commandline import Headrace, Start, ended
from tests.cli.forking import Process
from tests.silo.services.calling import PUBLISH_STREAM, batch

READY = re.compile(rb"silo is ready: .*; gRPC on 127\.0\.0\.1:(\d+)$")


def ready(process: Process) -> int:
    """Wait until the silo serves. Returns its port."""
    assert process.stderr is not None
    for line in process.stderr:
        assert b"no subscription" not in line
        if match := READY.search(line.rstrip()):
            return int(match[1])
    raise AssertionError(ended(process))


class Producer:
    """Numbers its requests, and knows which were answered."""

    def __init__(self) -> None:
        self.answered = 0

    def requests(self, count: int) -> Iterator[bytes]:
        for number in range(self.answered + 1, self.answered + count + 1):
            sequence = ProducerSequence(producer="p", number=number, previous=number - 1)
            one = batch("shop/1", b"%d" % number)
            yield PublishStreamRequest(sequence=sequence, batches=[one]).SerializeToString()

    def publish(self, port: int, count: int, enough: int, then: Callable[[], None] = lambda: None) -> None:
        """Send `count` requests at once, and call `then` when `enough` of them are answered; return at the end of the
        call, whatever it is."""
        channel: Any
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Iterator[bytes]
            call = channel.stream_stream(f"/{PUBLISH_STREAM}")(self.requests(count), wait_for_ready=True, timeout=60)
            with suppress(grpc.RpcError):
                for answered, response in enumerate(call, start=1):
                    assert not PublishStreamResponse.FromString(response).HasField("error")
                    self.answered += 1
                    if answered == enough:
                        then()


def published(headrace: Headrace) -> list[str]:
    return headrace(
        "subscribe", "shop/1", "--data", "d", "--from", "earliest", "--no-follow", "--format", "raw"
    ).out.split()


def test_a_silo_with_grpc_needs_no_modules_and_stops_in_order(start: Start):
    process = start("silo", "--data", "d", "--listen", "127.0.0.1:0")
    port = ready(process)
    channel: Any
    silent: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(f"/{PUBLISH_STREAM}")(iter(silent.get, b""), timeout=60)
        silent.put(next(Producer().requests(1)))
        assert not PublishStreamResponse.FromString(next(call)).HasField("error")
        process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        silent.put(b"")
        rest = ended(process)
    assert "the silo stops: everything answered is stored" in str(caught.value)
    assert rest.code == 0, rest
    assert "silo has stopped" in rest.err
    assert "Traceback" not in rest.err


def test_a_port_that_is_taken_is_told_in_one_line(start: Start, headrace: Headrace):
    port = ready(start("silo", "--data", "d", "--listen", "127.0.0.1:0"))
    told = headrace("silo", "--data", "d", "--listen", f"127.0.0.1:{port}")
    assert told.refused(1) == (
        f"127.0.0.1:{port} is in use by another process, perhaps a silo: stop it, or name another port for gRPC"
    )


@pytest.mark.parametrize("round_", range(2))
def test_events_answered_by_a_killed_silo_are_stored_once(start: Start, headrace: Headrace, round_: int):
    producer = Producer()
    process = start("silo", "--data", "d", "--listen", "127.0.0.1:0")
    port = ready(process)
    producer.publish(port, 2000, 20 + 50 * round_, process.kill)
    process.communicate()
    answered = producer.answered
    ready(start("silo", "--data", "d", "--listen", f"127.0.0.1:{port}"))
    while producer.answered < 2000:
        producer.publish(port, 2000 - producer.answered, 0)
    assert 0 < answered < 2000
    assert published(headrace) == [str(number) for number in range(1, 2001)]
