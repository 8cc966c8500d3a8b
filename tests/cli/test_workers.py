"""`headrace silo --workers N`: processes that a supervisor keeps running."""

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace import InvalidArgument
from headrace.server.config import GrpcConfig, HttpConfig
from headrace.silo.config import ClusterConfig, SiloConfig
from headrace.silo.supervisor import WorkerExit, WorkerStatus, configurations
from tests.cli.commandline import Headrace
from tests.silo.talking import PATIENCE_S, Talking, gone, shares, wait_until

SILO = ["silo", "--data", "data", "--listen", "127.0.0.1:0", "--workers", 2]
MODULE = """
import asyncio
from headrace import Event, Start, subscription

@subscription("printer", "shop/*", start=Start.earliest())
async def printer(event: Event) -> None:
    with open("began", "a"):
        await asyncio.sleep(1e9)
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Talking]:
    """Of two workers, w-1 and w-2, which are ready."""
    (tmp_path / "silo.toml").write_text('[cluster]\nname = "w"\nmaturity_s = 0.2\nperiod_s = 0.1\n')
    talking = Talking(tmp_path, *SILO, "silo.toml")
    try:
        talking.until_said(r"all 2 workers are ready: gRPC on (\S+)\n")
        yield talking
    finally:
        talking.clean_up()


def addresses(supervisor: Talking) -> list[str]:
    return supervisor.until_said(r"all 2 workers are ready: gRPC on (\S+)\n")[1].split(",")


def pids(supervisor: Talking) -> dict[str, int]:
    """Of the workers, by name."""
    found: dict[str, int] = {}
    for lock in (supervisor.directory / "data" / "locks" / ".silos").glob("*.lock"):
        found[lock.stem] = int(lock.read_text())
    return found


@pytest.mark.long
def test_the_workers_are_a_cluster_in_which_one_that_dies_comes_back(supervisor: Talking, headrace: Headrace):
    first, second = addresses(supervisor)
    wait_until(second, lambda cluster: shares(cluster) == {"w-1": 4, "w-2": 4})
    told = headrace("cluster", "--server", first, "--json").json
    assert [silo["address"] for silo in told["silos"]] == [first, second]
    assert re.search(r" INFO w-2 headrace.silo: silo is ready", supervisor.said)

    killed = pids(supervisor)["w-2"]
    said = len(supervisor.said)
    os.kill(killed, signal.SIGKILL)
    supervisor.until_said(r"worker 'w-2' ended: killed by SIGKILL; it starts again", said)
    supervisor.until_said(rf"w-2 headrace.silo: silo is ready: .*gRPC on {second}\n", said)
    wait_until(first, lambda cluster: shares(cluster) == {"w-1": 4, "w-2": 4})
    assert pids(supervisor)["w-2"] != killed

    said = len(supervisor.said)
    os.kill(pids(supervisor)["w-1"], signal.SIGTERM)
    supervisor.until_said(r"worker 'w-1' ended: it was stopped; it starts again now", said)
    supervisor.until_said(rf"w-1 headrace.silo: silo is ready: .*gRPC on {first}\n", said)
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.ended() == 0
    for name in ("w-1", "w-2"):
        assert f"{name} headrace.silo: silo has stopped: its progress is saved" in supervisor.said[said:]


@pytest.mark.long
def test_without_their_supervisor_they_stop_in_order(supervisor: Talking):
    workers = pids(supervisor).values()
    supervisor.process.kill()
    assert gone(workers)
    supervisor.ended()
    assert supervisor.said.count("the supervisor is gone: this silo stops") == 2
    assert supervisor.said.count("silo has stopped: its progress is saved") == 2


FORKING = """
import os, time

if not (child := os.fork()):
    time.sleep(1e6)
with open("children", "a") as file:
    file.write(f"{child} ")
"""


@pytest.mark.long
def test_a_worker_that_died_comes_back_while_a_process_that_it_forked_lives_on(tmp_path: Path):
    (tmp_path / "handlers.py").write_text(FORKING)
    (tmp_path / "silo.toml").write_text('[cluster]\nname = "w"\nmaturity_s = 0.2\nperiod_s = 0.1\n')
    supervisor = Talking(tmp_path, *SILO, "silo.toml", "--module", "handlers")
    try:
        supervisor.until_said("all 2 workers are ready")
        said = len(supervisor.said)
        os.kill(pids(supervisor)["w-2"], signal.SIGKILL)
        supervisor.until_said("worker 'w-2' ended: killed by SIGKILL; it starts again", said)
        supervisor.until_said("w-2 headrace.silo: silo is ready", said)
        supervisor.process.send_signal(signal.SIGTERM)
        assert supervisor.process.wait(PATIENCE_S) == 0
    finally:
        supervisor.process.kill()
        for child in (tmp_path / "children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        supervisor.clean_up()


@pytest.mark.long
def test_a_second_signal_ends_all_at_once(tmp_path: Path, headrace: Headrace):
    (tmp_path / "handlers.py").write_text(MODULE)
    assert headrace("publish", "--data", "data", "--stream", "shop/1", stdin=b"1\n").code == 0
    supervisor = Talking(tmp_path, *SILO, "--module", "handlers", "--drain", "1000")
    try:
        supervisor.until_said("all 2 workers are ready")
        while not (tmp_path / "began").exists():
            assert supervisor.process.poll() is None
        workers = pids(supervisor).values()
        supervisor.process.send_signal(signal.SIGTERM)
        supervisor.until_said("supervisor stops its 2 workers")
        while not supervisor.has_ended(within_s=0.2):
            supervisor.process.send_signal(signal.SIGTERM)
        assert supervisor.ended() == -signal.SIGTERM
        assert gone(workers)
    finally:
        supervisor.clean_up()


def test_ports_of_workers_that_overlap_are_refused():
    close = msgspec.structs.replace(CONFIG, grpc=GrpcConfig(port=9465), http=HttpConfig(port=9464))
    with pytest.raises(InvalidArgument, match="gRPC and HTTP would both take port 9465"):
        configurations(close, 3)
    assert len(configurations(close, 1)) == 1


@pytest.mark.long
def test_reason_that_workers_cannot_start_is_printed_once(headrace: Headrace):
    refused = headrace(*SILO, "--module", "nowhere").refused(2)
    assert refused == "module 'nowhere' cannot be imported: ModuleNotFoundError: No module named 'nowhere'"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = headrace(*SILO, "--listen", f"127.0.0.1:{port}").refused(1)
    assert refused.startswith(f"127.0.0.1:{port} is in use by another process")


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--workers", 2], "workers call each other by gRPC: give its port (--listen HOST:PORT, or grpc.port)"),
        (["--workers", 0, "--listen", "127.0.0.1:0"], "command line: workers = 0: expected an integer >= 1"),
        (["--workers", 3, "--listen", "127.0.0.1:65534"], "grpc.port: 3 workers from port 65534 on would need ports"),
    ],
)
def test_impossible_arguments_are_refused_in_one_line(flags: list[object], reason: str, headrace: Headrace):
    assert reason in headrace("silo", "--data", "data", *flags).refused(2)


@pytest.mark.long
def test_a_wrong_option_of_an_adapter_is_named_with_the_file(tmp_path: Path, headrace: Headrace):
    text = 'data = "data"\nworkers = 2\n[grpc]\nport = 0\n[providers.default.options]\nretain_ages = 5\n'
    (tmp_path / "silo.toml").write_text(text)
    refused = headrace("silo", "silo.toml").refused(2)
    assert refused.startswith("silo.toml: [providers.default.options]: adapter 'log': retain_ages: unknown option")


CONFIG = SiloConfig(data="d", workers=3, grpc=GrpcConfig(port=9465), cluster=ClusterConfig(name="w"))


def test_each_has_a_name_and_ports_of_its_own():
    made = configurations(msgspec.structs.replace(CONFIG, http=HttpConfig(port=9100)), 3)
    assert [(one.cluster.name, one.grpc.port, one.http.port) for one in made if one.cluster] == [
        ("w-1", 9465, 9100), ("w-2", 9466, 9101), ("w-3", 9467, 9102),
    ]  # fmt: skip
    assert {(one.data, one.workers) for one in made} == {("d", None)}
    assert json.loads(msgspec.json.encode(made[0]))["grpc"]["port"] == 9465


def test_without_a_name_it_is_the_machines_and_without_a_port_a_free_one():
    made = configurations(msgspec.structs.replace(CONFIG, cluster=None, grpc=GrpcConfig(port=0)), 2)
    assert [one.cluster and one.cluster.name for one in made] == [f"{socket.gethostname()}-{n}" for n in (1, 2)]
    ports = {one.grpc.port for one in made}
    assert len(ports) == 2
    assert 0 not in ports
    assert {one.http.port for one in made} == {None}


@pytest.mark.parametrize(("address", "last"), [("10.0.0.7:1", "10.0.0.7:9467"), ("[::1]:1", "[::1]:9467")])
def test_others_reach_each_at_its_own_port(address: str, last: str):
    named = msgspec.structs.replace(CONFIG, cluster=ClusterConfig(name="w", address=address, public_address=address))
    cluster = configurations(named, 3)[2].cluster
    assert cluster is not None
    assert cluster.address == last
    assert cluster.public_address == last


def test_a_name_that_is_none_is_refused():
    with pytest.raises(InvalidArgument, match=r"cluster.name: 'a b-1' is no name of a silo"):
        configurations(msgspec.structs.replace(CONFIG, cluster=ClusterConfig(name="a b")), 2)


def test_one_that_was_told_to_stop_before_it_began_has_ended_in_order():
    assert WorkerExit(-signal.SIGTERM, WorkerStatus(), None).in_order
    assert not WorkerExit(-signal.SIGTERM, WorkerStatus(), 1.0).in_order
    assert not WorkerExit(-signal.SIGKILL, WorkerStatus(), None).in_order
    assert WorkerExit(0, WorkerStatus(), 1.0).in_order
