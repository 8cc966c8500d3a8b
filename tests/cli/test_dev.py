"""`headrace dev` and `headrace init`."""

import logging
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watchfiles import Change

from headrace import SyncClient
from headrace.cli.development import RETRY_S, ProjectFilter
from headrace.cli.log_format import ColourFormatter
from tests.cli.commandline import ENVIRONMENT, SCRIPT, Headrace
from tests.cli.projects import DevelopmentProcess
from tests.test_readme import free_ports

FILES = ["README.md", "handlers.py", "silo.toml", "test_handlers.py"]


def publish(port: int, item: str) -> None:
    with SyncClient(f"127.0.0.1:{port}") as client:
        client.stream("orders", "1").publish({"item": item, "price": 1})


def test_init_writes_a_project_once(tmp_path: Path, headrace: Headrace) -> None:
    assert headrace("init", "my shop", "--json").json == {"folder": "my shop", "files": FILES}
    project = tmp_path / "my shop"
    assert sorted(file.name for file in project.iterdir()) == FILES
    assert (project / "README.md").read_text().startswith("# my shop\n")
    (project / "README.md").write_text("mine")
    (project / "silo.toml").unlink()
    refused = headrace("init", "my shop").refused(1)
    assert refused.startswith("'my shop' has README.md, handlers.py, test_handlers.py already")
    assert (project / "README.md").read_text() == "mine"
    assert not (project / "silo.toml").exists()


def test_a_new_project_passes_ruff_and_its_formatter(tmp_path: Path, headrace: Headrace) -> None:
    headrace("init")
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--isolated", "."]
        ran = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout


def test_init_says_how_to_go_on(headrace: Headrace) -> None:
    assert "`headrace dev 'my shop'`" in headrace("init", "my shop").err
    assert "`headrace dev`" in headrace("init").err


def test_init_refuses_a_file_as_directory(tmp_path: Path, headrace: Headrace) -> None:
    (tmp_path / "shop").touch()
    assert "'shop' is a file" in headrace("init", "shop").refused(2)


def test_the_configuration_of_a_new_project_is_valid(tmp_path: Path, headrace: Headrace) -> None:
    headrace("init")
    (tmp_path / "handlers.py").write_text("raise SystemExit('imported')")
    assert "module 'handlers' cannot be imported: SystemExit: imported" in headrace("silo", "silo.toml").refused(2)


@pytest.mark.long
def test_dev_starts_again_when_a_file_changes_and_keeps_the_events(tmp_path: Path, headrace: Headrace) -> None:
    headrace("init", "shop")
    handlers, settings = tmp_path / "shop" / "handlers.py", tmp_path / "shop" / "silo.toml"
    good = handlers.read_text()
    port = free_ports(2)
    command = [SCRIPT, "dev", "shop", "--listen", f"127.0.0.1:{port}", "--port", str(port + 1)]
    with DevelopmentProcess(command, tmp_path) as dev:
        dev.until("silo is ready")
        publish(port, "book")
        dev.until("a receipt for book, 1")

        handlers.write_text(good + "\nsend_receipt(")
        log = dev.until("the silo starts again when a file changes")
        line = good.count("\n") + 2
        where = re.escape(f"at {handlers}:{line}: send_receipt(")
        assert re.search(rf"ERROR headrace\.dev: module 'handlers' cannot be imported: SyntaxError: .*, {where}", log)
        assert "Traceback" not in log

        pen = b'{"item": "pen", "price": 1}'
        assert headrace("publish", "--data", "shop/.headrace", "--stream", "orders/1", stdin=pen).code == 0
        handlers.write_text(good.replace("a receipt for", "a bill for"))
        dev.until("a bill for pen, 1")

        before = settings.read_text()
        settings.write_text("quues = 3\n")
        log = dev.until("the silo starts again when a file changes", 2)
        assert f"{settings}: quues: unknown option" in log
        settings.write_text(before)
        dev.until("silo is ready", 3)
        publish(port, "desk")
        log = dev.until("a bill for desk, 1")
        assert dev.end(signal.SIGTERM) == 0
    assert [log.count(f"for {item}, 1") for item in ("book", "pen", "desk")] == [1, 1, 1]


@pytest.mark.long
def test_dev_survives_a_silo_that_dies(tmp_path: Path, headrace: Headrace) -> None:
    headrace("init")
    handlers = tmp_path / "handlers.py"
    good = handlers.read_text()
    handlers.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with DevelopmentProcess([SCRIPT, "dev", "--listen", "127.0.0.1:0", "--port", "0"], tmp_path) as dev:
        dev.until("ERROR headrace.dev: the silo ended: killed by SIGKILL")
        handlers.write_text(good)
        dev.until("silo is ready")
        assert dev.end() == 0


@pytest.mark.long
def test_dev_goes_on_when_the_tables_for_effects_are_created_meanwhile(tmp_path: Path, headrace: Headrace) -> None:
    headrace("init")
    (tmp_path / "handlers.py").write_text(
        "from sqlalchemy import create_engine\n"
        "from headrace import Effects, Event, Transaction, subscription\n"
        "@subscription('billing', 'orders/*', effects=Effects(create_engine('sqlite:///user.db')))\n"
        "async def billing(event: Event, tx: Transaction) -> None: ...\n"
    )
    with DevelopmentProcess([SCRIPT, "dev", "--listen", "127.0.0.1:0", "--port", "0"], tmp_path) as dev:
        dev.until("create them with 'headrace effects migrate sqlite:///user.db'")
        dev.until("the silo starts again when a file changes, and is tried again every 2 s until then")
        time.sleep(3 * RETRY_S)  # two more attempts fail
        assert headrace("effects", "migrate", "sqlite:///user.db").code == 0
        log = dev.until("silo is ready")
        assert dev.end() == 0
    assert log.count("has no tables for effects") == 1


@pytest.mark.long
def test_dev_keeps_its_free_port_while_no_silo_runs(tmp_path: Path, headrace: Headrace) -> None:
    headrace("init")
    handlers = tmp_path / "handlers.py"
    good = handlers.read_text()
    with DevelopmentProcess([SCRIPT, "dev", "--listen", "127.0.0.1:0", "--port", "0"], tmp_path) as dev:
        ready = re.compile(r"silo is ready.*; gRPC on 127\.0\.0\.1:(\d+)")
        (port,) = ready.findall(dev.until("silo is ready"))
        handlers.write_text(good + "\nsend_receipt(")
        dev.until("the silo starts again when a file changes")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(port)))
        handlers.write_text(good)
        assert ready.findall(dev.until("silo is ready", 2)) == [port, port]
        assert dev.end() == 0


@pytest.mark.parametrize(("taken", "option"), [(0, "--listen HOST:PORT"), (1, "--port PORT")])
def test_a_port_in_use_is_told_with_its_option(taken: int, option: str, tmp_path: Path, headrace: Headrace) -> None:
    headrace("init")
    port = free_ports(2)
    with socket.create_server(("127.0.0.1", port + taken)):
        refused = headrace("dev", "--listen", f"127.0.0.1:{port}", "--port", port + 1).refused(1)
    assert refused.startswith(f"127.0.0.1:{port + taken} is in use")
    assert refused.endswith(f"or give {option}")
    assert not (tmp_path / ".headrace").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("listen", "port", "problem"),
    [
        ("0.0.0.0:9465", 9464, "--listen 0.0.0.0:9465: not an address of this machine alone, and headrace dev has no"),
        ("shop.invalid:9465", 9464, "--listen shop.invalid:9465: not an address of this machine alone"),
        ("[2001:db8::1]:9465", 9464, "--listen [2001:db8::1]:9465: not an address of this machine alone"),
        ("127.0.0.1", 9464, "'127.0.0.1' is no address: write HOST:PORT"),
        ("127.0.0.1:65536", 9464, "'127.0.0.1:65536' is no address: ports are numbers up to 65535"),
        ("127.0.0.1:{free}", "{free}", "--listen and --port have the same port {free}: give another one"),
    ],
)  # fmt: skip
def test_an_address_that_can_never_be_right_ends_the_command(
    listen: str, port: int | str, problem: str, tmp_path: Path, headrace: Headrace
) -> None:
    headrace("init")
    free = free_ports(1)
    arguments = ["--listen", listen.format(free=free), "--port", str(port).format(free=free)]
    assert headrace("dev", *arguments).refused(2).startswith(problem.format(free=free))
    assert not (tmp_path / ".headrace").exists()


def test_a_variable_that_can_never_be_right_ends_the_command(
    headrace: Headrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    headrace("init")
    monkeypatch.setitem(ENVIRONMENT, "HEADRACE_DRAIN_S", "soon")
    refused = headrace("dev", "--listen", "127.0.0.1:0", "--port", "0").refused(2)
    assert refused.startswith('HEADRACE_DRAIN_S = "soon": expected')


def test_a_directory_without_a_project_is_told(tmp_path: Path, headrace: Headrace) -> None:
    assert headrace("dev").refused(1).startswith("'.' has no silo.toml: create a project with `headrace init`")
    assert "Directory 'nowhere' does not exist" in headrace("dev", "nowhere").refused(2)


@pytest.mark.long
def test_a_fault_that_no_file_has_is_told_and_the_next_change_tries_again(tmp_path: Path, headrace: Headrace) -> None:
    headrace("init")
    ports = ["--listen", "127.0.0.1:0", "--port", "0"]
    headrace("subscriptions", "create", "receipts", "other/*", "--data", ".headrace", "--adapter", "log")
    with DevelopmentProcess([SCRIPT, "dev", *ports], tmp_path) as dev:
        dev.until("ERROR headrace.dev: subscription 'receipts' exists with another definition")
        headrace("subscriptions", "delete", "receipts", "--data", ".headrace")
        (tmp_path / "handlers.py").touch()
        dev.until("silo is ready")
        assert dev.end() == 0


@pytest.mark.slow  # it waits for ten seconds
def test_a_silo_that_does_not_stop_is_killed(tmp_path: Path, headrace: Headrace) -> None:
    headrace("init")
    handlers = tmp_path / "handlers.py"
    good = handlers.read_text()
    handlers.write_text(f"import time\n{good}    print('stuck', flush=True)\n    time.sleep(1000)\n")
    with DevelopmentProcess([SCRIPT, "dev", "--listen", "127.0.0.1:0", "--port", "0"], tmp_path) as dev:
        dev.until("silo is ready")
        headrace("publish", "--data", ".headrace", "--stream", "orders/1", stdin=b'{"item": "book", "price": 1}')
        dev.until("stuck")
        handlers.write_text(good)
        dev.until("WARNING headrace.dev: the silo has not stopped within 10 s: it is killed")
        dev.until("a receipt for book, 1", 2)
        assert dev.end() == 0


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("handlers.py", True), ("shop/prices.py", True), ("silo.toml", True), ("shop/silo.toml", False),
        ("README.md", False), (".venv/lib/x.py", False), ("shop/__pycache__/x.py", False), ("shop/.#x.py", False),
        (".headrace/control.db", False),
    ],
)  # fmt: skip
def test_changes_of_code_and_settings_count(path: str, counts: bool) -> None:
    project = Path("/srv/node_modules/shop")
    assert ProjectFilter(project / "silo.toml")(Change.modified, str(project / path)) == counts


def test_a_log_in_colour_has_the_level_in_a_colour_before_the_text() -> None:
    record = logging.LogRecord("handlers", logging.WARNING, "handlers.py", 1, "%d left", (2,), None)
    line = ColourFormatter().format(record)
    plain = re.sub(r"\x1b\[[\d;]*m", "", line)
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning 2 left handlers", plain)
    assert "\x1b[33m\x1b[1mwarning\x1b[0m" in line
