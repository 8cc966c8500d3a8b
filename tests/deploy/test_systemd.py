"""The units of systemd, checked by systemd itself, and with a silo that sends it messages as the unit asks for."""

import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.servers import find_program
from headrace.silo.config import SiloConfig
from tests.cli.commandline import ENVIRONMENT, SCRIPT, Start, ended
from tests.deploy.manifests import DEPLOY, unit

UNITS = sorted(path.name for path in (DEPLOY / "systemd").iterdir())


def test_systemd_accepts_the_units(tmp_path: Path):
    for name in UNITS:
        text = (DEPLOY / "systemd" / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("/opt/headrace/bin/headrace", "/bin/true"))
    program = find_program("systemd-analyze", debian_package="systemd")
    command = [program, "verify", "--man=no", *(str(tmp_path / name) for name in UNITS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_unknown_setting_would_be_found(tmp_path: Path):
    (tmp_path / "x.service").write_text("[Service]\nExecStart=/bin/true\nTimeoutStopSecs=1\n")
    program = find_program("systemd-analyze", debian_package="systemd")
    command = [program, "verify", "--man=no", str(tmp_path / "x.service")]
    assert "TimeoutStopSecs" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_the_unit_gives_the_silo_time_to_stop_and_names_its_program():
    silo = unit("headrace.service")
    assert float(silo["TimeoutStopSec"]) >= 2 * SiloConfig().drain_s + 10
    assert (silo["Type"], silo["KillMode"], silo["User"]) == ("notify", "mixed", "headrace")
    assert " silo /etc/headrace/silo.toml --data /var/lib/headrace/data" in silo["ExecStart"]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of systemd, which a silo sends its messages to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind("")  # an abstract name of its own
        channel.settimeout(60)
        monkeypatch.setitem(ENVIRONMENT, "NOTIFY_SOCKET", "@" + channel.getsockname()[1:].decode())
        yield channel


def messages_until(channel: socket.socket, last: bytes) -> list[bytes]:
    found = [channel.recv(1000)]
    while found[-1] != last:
        found.append(channel.recv(1000))
    return found


def messages_until_silence(channel: socket.socket) -> list[bytes]:
    found: list[bytes] = []
    while True:
        try:
            found.append(channel.recv(1000))
        except TimeoutError:
            return found


# With one silo, the test is quicker.
@pytest.mark.parametrize("workers", [[], pytest.param(["--workers", "2"], marks=pytest.mark.slow)])
def test_a_silo_reports_that_it_is_ready(start: Start, manager: socket.socket, workers: list[str]):
    process = start("silo", "--data", "data", "--listen", "127.0.0.1:0", *workers)
    assert manager.recv(1000) == b"READY=1"
    process.send_signal(signal.SIGTERM)
    assert ended(process).code == 0
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(1000)


@pytest.mark.long
def test_a_silo_reports_that_its_event_loop_runs(start: Start, manager: socket.socket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ENVIRONMENT, "WATCHDOG_USEC", "200000")
    process = start("silo", "--data", "data", "--listen", "127.0.0.1:0", program=[SCRIPT])
    messages_until(manager, b"READY=1")
    assert [manager.recv(1000) for _ in range(3)] == [b"WATCHDOG=1"] * 3
    process.send_signal(signal.SIGSTOP)
    manager.settimeout(1)
    assert set(messages_until_silence(manager)) <= {b"WATCHDOG=1"}
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    assert ended(process).code == 0


def test_programs_that_handlers_start_get_no_socket(start: Start, manager: socket.socket, tmp_path: Path):
    (tmp_path / "handlers.py").write_text("import os\nprint('socket', os.environ.get('NOTIFY_SOCKET'))\n")
    process = start("silo", "--data", "data", "--module", "handlers", "--listen", "127.0.0.1:0")
    assert manager.recv(1000) == b"READY=1"
    process.send_signal(signal.SIGTERM)
    assert ended(process).out == "socket None\n"


@pytest.mark.parametrize("left", ["nothing", "a socket that nobody reads"])
def test_a_silo_whose_manager_is_gone_serves_all_the_same(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: str
):
    if left != "nothing":
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
            gone.bind(str(tmp_path / "gone"))
    monkeypatch.setitem(ENVIRONMENT, "NOTIFY_SOCKET", str(tmp_path / "gone"))
    process = start("silo", "--data", "data", "--listen", "127.0.0.1:0")
    assert process.stderr is not None
    lines = iter(process.stderr.readline, b"")
    assert any(b"READY=1 could not be sent to" in line for line in lines)
    process.send_signal(signal.SIGTERM)
    assert ended(process).code == 0
