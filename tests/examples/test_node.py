"""The Node.js example against a real silo: events reach the consumers, also if one of them or the silo is killed."""

import asyncio
import contextlib
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.servers import find_program
from benchmarks.silo_server import SiloServer
from headrace import Provider, Selector, StreamId, SubscriptionDefinition, SyncClient
from tests.client.silos import SiloProcess
from tests.examples.programs import TIMEOUT_S, Program, first_times, numbered, of_stream, stop_worker

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "node"
KILLS = 1
"""Of the silo, while a producer and a consumer run."""


class Wire:
    """A connection to a server, on a port of its own, whose answers can get lost."""

    def __init__(self, address: str) -> None:
        self._upstream = address.rpartition(":")[::2]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._lost = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return "127.0.0.1:{1}".format(*self._listener.getsockname())

    def lose_answers(self) -> None:
        """From now on the server hears, and is not heard."""
        self._lost = True

    def cut(self) -> None:
        """Close the open connections. New connections are good."""
        self._lost = False
        while self._open:
            end = self._open.pop()
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                host, port = self._upstream
                server = socket.create_connection((host, int(port)))
                self._open += [client, server]
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not (answers and self._lost):
                    target.sendall(data)


def node() -> str:
    return find_program("node", debian_package="nodejs")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its dependencies, as `npm ci` installs them."""
    folder = tmp_path_factory.mktemp("node") / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    find_program("node", debian_package="nodejs")
    npm = find_program("npm", debian_package="npm")
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def silo(tmp_path: Path) -> Iterator[SiloProcess]:
    silo = SiloProcess(tmp_path)
    silo.start()
    yield silo
    silo.kill()


Start = Callable[..., Program]


@pytest.fixture
def start(installed: Path, silo: SiloProcess, tmp_path: Path) -> Iterator[Start]:
    programs: list[Program] = []

    def begin(program: str, *arguments: str, stdin: int | None = None, address: str = "") -> Program:
        output = tmp_path / f"{len(programs)}-{program}.txt"
        started = Program(installed, output, node(), f"{program}.js", address or silo.address, *arguments, stdin=stdin)
        programs.append(started)
        return started

    yield begin
    for one in programs:
        one.process.kill()
        one.process.communicate()


def publish(start: Start, stream: str, lines: Sequence[str], *, address: str = "") -> None:
    """Run the producer to its end."""
    producer = start("producer", stream, stdin=subprocess.PIPE, address=address)
    producer.process.communicate("".join(f"{line}\n" for line in lines).encode(), timeout=TIMEOUT_S)
    assert producer.process.returncode == 0, producer.lines
    noun = "event is" if len(lines) == 1 else "events are"
    assert producer.lines == [f"{len(lines)} {noun} stored"]


@pytest.mark.long
def test_consumer_gets_events_in_the_order_of_publishing(start: Start):
    publish(start, "orders/1", numbered(2_500))
    publish(start, "orders/a/b", ["größe 東京", "x" * 10_000, ""])
    publish(start, "others/1", ["not for us"])
    consumer = start("consumer", "printer", "orders/*")
    lines = consumer.until(lambda lines: len(lines) >= 2_503)
    assert of_stream(lines, "orders/1") == numbered(2_500)
    assert of_stream(lines, "orders/a/b") == ["größe 東京", "x" * 10_000, ""]
    assert consumer.end() == 0
    assert len(consumer.lines) == 2_503


@pytest.mark.long
def test_events_acknowledged_before_an_orderly_end_do_not_come_again(start: Start):
    publish(start, "orders/1", numbered(1_500))
    first = start("consumer", "printer", "orders/*")
    first.until(lambda lines: len(lines) == 1_500)
    assert first.end() == 0
    publish(start, "orders/1", numbered(10, first=1_500))
    second = start("consumer", "printer", "orders/*")
    assert of_stream(second.until(lambda lines: len(lines) >= 10), "orders/1") == numbered(10, first=1_500)
    assert second.end(signal.SIGINT) == 0
    assert len(second.lines) == 10


@pytest.mark.long
def test_two_consumers_share_the_events(start: Start):
    consumers = [start("consumer", "printer", "orders/*") for _ in range(2)]
    for number in range(6):
        publish(start, f"orders/{number % 4}", numbered(200, first=200 * number))
    deadline = time.monotonic() + TIMEOUT_S
    while sum(len(one.lines) for one in consumers) < 1_200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert [one.end() for one in consumers] == [0, 0]
    counts = Counter(line for one in consumers for line in one.lines)
    assert len(counts) == 1_200
    assert set(counts.values()) == {1}


@pytest.mark.long
def test_a_killed_consumer_loses_nothing(start: Start):
    publish(start, "orders/1", numbered(20_000))
    killed = start("consumer", "printer", "orders/*", "me")
    killed.until(lambda lines: len(lines) >= 3_000)
    killed.end(signal.SIGKILL)
    follower = start("consumer", "printer", "orders/*", "me")
    follower.until(lambda lines: bool(lines) and lines[-1].endswith(" 19999"))
    seen = of_stream([*killed.lines, *follower.lines], "orders/1")
    assert first_times(seen) == numbered(20_000)
    assert len(seen) - 20_000 <= 1_000, "more came again than could have been in its hands"


@pytest.mark.long
def test_producer_and_consumer_go_on_when_the_silo_is_killed_and_started_again(start: Start, silo: SiloProcess):
    consumer = start("consumer", "printer", "orders/*")
    producer = start("producer", "orders/1", stdin=subprocess.PIPE)
    for number in range(KILLS):
        producer.send(numbered(500, first=1_000 * number))
        consumer.until(lambda lines, number=number: lines != [] and lines[-1] == f"orders/1 {1_000 * number + 499}")
        silo.kill()
        producer.send(numbered(500, first=1_000 * number + 500))
        silo.start()
    consumer.until(lambda lines: f"orders/1 {1_000 * KILLS - 1}" in lines)
    assert first_times(of_stream(consumer.lines, "orders/1")) == numbered(1_000 * KILLS)
    producer.process.communicate(timeout=TIMEOUT_S)
    assert producer.lines[-1:] == [f"{1_000 * KILLS} events are stored"]
    assert consumer.end() == 0
    stored = start("consumer", "auditor", "orders/*").until(lambda lines: len(lines) >= 1_000 * KILLS)
    assert of_stream(stored, "orders/1") == numbered(1_000 * KILLS), "something was stored twice"


@pytest.mark.long
def test_stored_batch_is_not_stored_again_when_the_answer_got_lost(start: Start, silo: SiloProcess):
    consumer = start("consumer", "printer", "orders/*")
    with contextlib.closing(Wire(silo.address)) as wire:
        producer = start("producer", "orders/1", stdin=subprocess.PIPE, address=wire.address)
        for number in range(5):
            producer.send([f"good {number}"])
            consumer.until(lambda lines, number=number: len(lines) > 2 * number)
            wire.lose_answers()
            producer.send([f"lost {number}"])
            consumer.until(lambda lines, number=number: len(lines) > 2 * number + 1)
            wire.cut()
        producer.process.communicate(timeout=TIMEOUT_S)
    assert producer.lines[-1:] == ["10 events are stored"]
    assert of_stream(consumer.lines, "orders/1") == [f"{how} {n}" for n in range(5) for how in ("good", "lost")]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_consumer_follows_the_owners_of_queues(start: Start):
    with SiloServer(arguments=("--workers", "2")) as silos:
        addresses = f"{silos.address},127.0.0.1:{silos.port + 1}"
        consumer = start("consumer", "printer", "orders/*", address=addresses)
        for round_, number in enumerate((signal.SIGTERM, signal.SIGKILL, 0)):
            with SyncClient(addresses) as client:
                for stream in range(8):
                    client.publish(
                        StreamId("orders", f"{stream}"), [b"%d" % n for n in range(round_ * 100, round_ * 100 + 100)]
                    )
            count = 800 * (round_ + 1)
            consumer.until(lambda lines, count=count: len({line for line in lines if "orders/" in line}) >= count)
            if number:
                stop_worker(silos, number)
        assert consumer.end() == 0
    for stream in range(8):
        values = of_stream(consumer.lines, f"orders/{stream}")
        assert first_times(values) == numbered(300)
        assert values[:200] == numbered(200), "a queue that moved in order was delivered twice"


@pytest.mark.long
def test_consumer_does_not_create_a_deleted_subscription_again(start: Start, silo: SiloProcess):
    consumers = [start("consumer", name, "orders/*") for name in ("deleted", "anew")]
    publish(start, "orders/1", ["0"])
    for consumer in consumers:
        consumer.until(lambda lines: lines != [])
    silo.stop()
    asyncio.run(replace_subscriptions(silo.data))
    silo.start()
    assert [consumer.process.wait(TIMEOUT_S) for consumer in consumers] == [1, 1]
    deleted, anew = (consumer.lines[-1] for consumer in consumers)
    assert re.match(r"consumer: .*'deleted'", deleted)
    assert anew == "consumer: anew was created anew, and selects others/*"
    with SyncClient(silo.address) as client:
        assert [one.name for one in client.subscriptions()] == ["anew"]


async def replace_subscriptions(data: Path) -> None:
    async with Provider.open(data) as provider:
        for name in ("deleted", "anew"):
            await provider.delete_subscription(name)
        await provider.create_subscription(SubscriptionDefinition(name="anew", selector=Selector("others/*")))


@pytest.mark.long
def test_hopeless_consumer_ends_with_a_message(start: Start):
    consumer = start("consumer", "not a name!", "orders/*")
    assert consumer.process.wait(TIMEOUT_S) == 1
    (line,) = consumer.lines
    assert re.match(r"consumer: .*not a name!", line)


@pytest.mark.long
def test_without_an_answer_both_report_once_and_the_producer_gives_up(installed: Path, start: Start):
    program, times = re.subn("MAX_FAILURES = 15;", "MAX_FAILURES = 6;", (installed / "producer.js").read_text())
    assert times == 1
    (installed / "impatient.js").write_text(program)
    consumer = start("consumer", "printer", "orders/*", address="127.0.0.1:1")
    consumer.until(lambda lines: lines != [])
    producer = start("impatient", "orders/1", stdin=subprocess.PIPE, address="127.0.0.1:1")
    producer.process.communicate(b"x\n", timeout=TIMEOUT_S)
    assert producer.process.returncode == 1
    first, last = producer.lines
    assert re.fullmatch(r"producer: .*127\.0\.0\.1:1.*: trying again", first)
    assert re.match(r"producer: .*127\.0\.0\.1:1", last)
    (line,) = consumer.lines
    assert re.fullmatch(r"consumer: .*127\.0\.0\.1:1.*: trying again", line)


@pytest.mark.long
def test_usage_is_told(installed: Path, tmp_path: Path):
    for name in ("producer", "consumer"):
        program = Program(installed, tmp_path / name, node(), f"{name}.js")
        assert program.process.wait(TIMEOUT_S) == 1
        assert program.lines[0].startswith(f"{name}: usage: node {name}.js ADDRESS")
