"""The short examples in Node.js, Go and Java against two real silos, of which one is killed.

Go and Java are tested on machines that have them.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.servers import find_program
from benchmarks.silo_server import SiloServer
from headrace import StreamId, SyncClient
from tests.examples.programs import ENVIRONMENT, TIMEOUT_S, Program, first_times, numbered, of_stream, stop_worker

EXAMPLES = Path(__file__).parents[2] / "examples"
LANGUAGES = ("node", *(language for language, tool in {"go": "go", "java": "javac"}.items() if shutil.which(tool)))


class Example(NamedTuple):
    """The commands of an example, without their arguments."""

    language: str
    folder: Path
    consumer: Sequence[str]
    producer: Sequence[str]


def build(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] = ENVIRONMENT) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (done.stdout, done.stderr)


def node_example(folder: Path) -> Example:
    node, npm = find_program("node", debian_package="nodejs"), find_program("npm", debian_package="npm")
    build([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
    return Example("node", folder, (node, "pull.js"), (node, "producer.js"))


def go_example(folder: Path) -> Example:
    """As its README says, with the protoc of grpcio-tools."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "protoc").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m grpc_tools.protoc "$@"\n')
    (tools / "protoc").chmod(0o755)
    build(["sh", "generate.sh"], folder, {**ENVIRONMENT, "PATH": f"{tools}{os.pathsep}{ENVIRONMENT['PATH']}"})
    build(["go", "build", "-o", tools, "./consumer", "./producer"], folder)
    return Example("go", folder, (str(tools / "consumer"),), (str(tools / "producer"),))


def java_example(folder: Path) -> Example:
    quick = {"MAVEN_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    build([find_program("mvn", debian_package="maven"), "-q", "-B", "compile"], folder, ENVIRONMENT | quick)
    run = ("java", "-XX:TieredStopAtLevel=1", "-cp", "target/classes:target/lib/*")
    return Example("java", folder, (*run, "headrace.example.Consume"), (*run, "headrace.example.Produce"))


BUILDERS = {"node": node_example, "go": go_example, "java": java_example}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples in a folder of their own, where they are built."""
    folder = tmp_path_factory.mktemp("examples") / "of all"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("node_modules", "__pycache__", "target"))
    return folder


@pytest.fixture(scope="module", params=LANGUAGES)
def example(request: pytest.FixtureRequest, copied: Path) -> Example:
    return BUILDERS[request.param](copied / request.param)


@pytest.fixture(scope="module")
def silos() -> Iterator[SiloServer]:
    with SiloServer(arguments=("--workers", "2")) as server:
        yield server


@pytest.mark.long
@pytest.mark.timeout(400)  # a new machine downloads and compiles the libraries
def test_producer_and_consumer_go_on_at_another_silo(example: Example, silos: SiloServer, tmp_path: Path) -> None:
    addresses, language = f"{silos.address},127.0.0.1:{silos.port + 1}", example.language
    stream, selector = f"{language}/a/b", f"{language}/*"

    def consume(subscription: str, number: int) -> Program:
        command = (*example.consumer, addresses, f"{subscription}-{language}", selector)
        return Program(example.folder, tmp_path / f"consumer-{number}.txt", *command)

    consumer = consume("printer", 1)
    command = (*example.producer, silos.address if language == "node" else addresses, stream)
    producer = Program(example.folder, tmp_path / "producer.txt", *command, stdin=subprocess.PIPE)
    producer.send(numbered(300))
    consumer.until(lambda lines: f"{stream} 299" in lines)
    stop_worker(silos, signal.SIGKILL)
    producer.send(numbered(300, first=300))
    producer.process.communicate(timeout=TIMEOUT_S)
    assert producer.lines[-1] == "600 events are stored"
    consumer.until(lambda lines: f"{stream} 599" in lines)
    assert first_times(of_stream(consumer.lines, stream)) == numbered(600)
    consumer.end()

    with SyncClient(addresses) as client:
        client.publish(StreamId.parse(stream), "größe 東京".encode())
    second = consume("printer", 2)
    second.until(lambda lines: f"{stream} größe 東京" in lines)
    assert of_stream(second.lines, stream) == ["größe 東京"], "acknowledged events came again after an orderly end"
    auditor = consume("auditor", 3)
    auditor.until(lambda lines: f"{stream} größe 東京" in lines)
    assert of_stream(auditor.lines, stream) == [*numbered(600), "größe 東京"], "something was stored twice"
    for one in (second, auditor):
        one.end()


@pytest.mark.long
def test_a_wrong_name_ends_a_consumer_with_the_reason(example: Example, silos: SiloServer, tmp_path: Path) -> None:
    command = (*example.consumer, silos.address, "not a name!", "orders/*")
    program = Program(example.folder, tmp_path / "wrong.txt", *command)
    assert program.process.wait(TIMEOUT_S) == 1
    assert "not a name!" in "\n".join(program.lines)
