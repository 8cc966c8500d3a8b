"""Real servers: found, started on a port of their own, and stopped with all their processes."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import PIPE

import pytest

from benchmarks.servers import INSTALL, LOOPBACK, NotAvailable, RedisServer, Server, find_program, process_tree


class ShellServer(Server):
    """A shell script in the place of a server; it answers once it has made the file `ready`."""

    name = "shell"
    start_timeout_s = 20.0

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script

    def command(self) -> Sequence[str]:
        return ("sh", "-c", self.script)

    def ping(self) -> bool:
        return (self.directory / "ready").exists()


def command(server: RedisServer, line: str) -> bytes:
    with socket.create_connection((LOOPBACK, server.port), timeout=5) as connection:
        connection.sendall(f"{line}\r\n".encode())
        return connection.recv(1024)


def test_a_started_server_answers(redis_server: RedisServer):
    assert command(redis_server, "PING") == b"+PONG\r\n"


def test_a_server_keeps_its_data_over_a_restart(tmp_path: Path):
    with RedisServer(tmp_path, appendfsync="always") as server:
        assert command(server, "SET key value") == b"+OK\r\n"
        server.kill()
        server.start()
        assert command(server, "GET key") == b"$5\r\nvalue\r\n"


def test_two_servers_run_side_by_side(redis_server: RedisServer):
    with RedisServer() as other:
        assert other.port != redis_server.port


def test_the_resources_of_a_server_are_counted(redis_server: RedisServer):
    before = redis_server.cpu_s()
    command(redis_server, "EVAL 'for i = 1, 5000000 do end' 0")
    assert redis_server.cpu_s() > before
    assert redis_server.peak_rss_bytes() > 1_000_000


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_no_process_of_a_server_outlives_it(end: str):
    with ShellServer("sleep 1000 & sleep 1000 & touch ready; wait") as server:
        tree = process_tree(server.pid)
        assert len(tree) == 3
        getattr(server, end)()
        assert not [pid for pid in tree if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_does_not_outlive_a_killed_owner():
    owner = """
import sys
from benchmarks.servers import RedisServer
server = RedisServer()
server.start()
print(server.pid, server.directory, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", owner], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout
        pid, directory = process.stdout.readline().split()
        process.kill()
    try:
        wait_until(lambda: not _runs(int(pid)))
    finally:
        shutil.rmtree(directory)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_temporary_directory_goes_with_its_server():
    server = ShellServer("touch ready; sleep 1000")
    with server:
        assert server.directory.is_dir()
    assert not server.directory.exists()


def test_a_server_that_ends_at_once_is_reported_with_its_log():
    with (
        pytest.raises(NotAvailable, match="no license for this machine"),
        ShellServer("echo no license for this machine"),
    ):
        pass


def test_a_server_that_was_not_started_has_no_process():
    server = ShellServer("")
    with pytest.raises(NotAvailable, match="call start"):
        _ = server.pid
    server.close()


def test_a_missing_program_is_reported_with_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(INSTALL, raising=False)
    with pytest.raises(NotAvailable, match="apt-get install some-package") as caught:
        find_program("no-such-program", debian_package="some-package")
    assert "HEADRACE_NO_SUCH_PROGRAM" in str(caught.value)


def test_a_program_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HEADRACE_SOME_SERVER", "/bin/sh")
    assert find_program("some-server", debian_package="x") == "/bin/sh"
    monkeypatch.setenv("HEADRACE_SOME_SERVER", str(tmp_path / "nothing"))
    with pytest.raises(NotAvailable, match="is no program"):
        find_program("some-server", debian_package="x")
