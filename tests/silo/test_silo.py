"""`headrace silo`: a real process that serves what modules declare, and stops in order."""

import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from headrace import InvalidArgument
from headrace.silo.config_loader import named_source
from tests.cli.commandline import ENVIRONMENT, Headrace, Start, ended
from tests.cli.forking import Process

HANDLERS = """
import asyncio
from headrace import Event, Start, subscription

@subscription("printer", "shop/*", start=Start.earliest(), concurrency=1)
async def printer(event: Event) -> None:
    await asyncio.sleep(PAUSE)
    with open("printed", "a") as file:
        file.write(event.payload.decode() + "\\n")
"""
CONFIG = 'data = "d"\nmodules = ["handlers"]\n[http]\nport = 0\n[providers.default]\nqueues = 2\n'


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text(HANDLERS.replace("PAUSE", "0"))
    (tmp_path / "silo.toml").write_text(CONFIG)


def publish(headrace: Headrace, *numbers: int) -> None:
    lines = b"".join(b"%d\n" % number for number in numbers)
    assert headrace("publish", "--data", "d", "--stream", "shop/log", "--queues", "2", stdin=lines).code == 0


def printed(directory: Path) -> list[int]:
    file = directory / "printed"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def ready(process: Process) -> str:
    """Wait until the silo serves. Returns its address."""
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(rb"silo is ready: .*; (http://\S+)/metrics", line):
            return match[1].decode()
    raise AssertionError(ended(process))


def until_printed(directory: Path, process: Process, count: int) -> None:
    while len(printed(directory)) < count:
        assert process.poll() is None, ended(process)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def until_handling(address: str, process: Process) -> None:
    running = 'headrace_handlers_running{provider="default",subscription="printer"} 1.0'
    while running not in get(f"{address}/metrics")[1]:
        assert process.poll() is None, ended(process)


def has_ended(process: Process, within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def test_a_silo_delivers_events_of_other_processes_and_stops_in_order(tmp_path: Path, headrace: Headrace, start: Start):
    publish(headrace, 1, 2)
    process = start("silo", "silo.toml")
    ready(process)
    publish(headrace, 3)
    until_printed(tmp_path, process, 3)
    process.send_signal(signal.SIGTERM)

    ran = ended(process)
    assert (ran.code, ran.out) == (0, "")
    assert "silo has stopped: its progress is saved" in ran.err
    publish(headrace, 4)
    process = start("silo", "silo.toml")
    ready(process)
    until_printed(tmp_path, process, 4)
    process.send_signal(signal.SIGINT)
    assert ended(process).code == 0
    assert printed(tmp_path) == [1, 2, 3, 4]


def test_killed_it_loses_nothing(tmp_path: Path, headrace: Headrace, start: Start):
    publish(headrace, *range(500))
    process = start("silo", "silo.toml")
    until_printed(tmp_path, process, 100)
    process.kill()
    process.wait()

    process = start("silo", "silo.toml")
    ready(process)
    while set(printed(tmp_path)) != set(range(500)):
        assert process.poll() is None, ended(process)
    process.send_signal(signal.SIGTERM)
    assert ended(process).code == 0


def test_a_running_handler_may_end_and_its_event_is_not_delivered_again(
    tmp_path: Path, headrace: Headrace, start: Start
):
    (tmp_path / "handlers.py").write_text(HANDLERS.replace("PAUSE", "0.3"))
    publish(headrace, 1)
    process = start("silo", "silo.toml")
    until_handling(ready(process), process)
    process.send_signal(signal.SIGTERM)
    assert ended(process).code == 0
    assert printed(tmp_path) == [1]

    (lag,) = {one["lag"] for one in headrace("subscriptions", "list", "--data", "d", "--json").json}
    assert lag == 0


def test_a_second_signal_ends_it_at_once(tmp_path: Path, headrace: Headrace, start: Start):
    (tmp_path / "handlers.py").write_text(HANDLERS.replace("PAUSE", "1e9"))
    publish(headrace, 1)
    process = start("silo", "silo.toml", "--drain", "1000")
    until_handling(ready(process), process)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert b"silo is stopping" in process.stderr.readline()
    while not has_ended(process, within_s=0.1):
        process.send_signal(signal.SIGTERM)

    assert process.returncode == -signal.SIGTERM


def test_a_handler_that_does_not_end_is_cancelled_and_its_event_kept(tmp_path: Path, headrace: Headrace, start: Start):
    (tmp_path / "handlers.py").write_text(HANDLERS.replace("PAUSE", "1e9"))
    publish(headrace, 1)
    process = start("silo", "silo.toml", "--drain", "0.1")
    until_handling(ready(process), process)
    process.send_signal(signal.SIGTERM)

    assert ended(process).code == 0
    assert headrace("subscriptions", "list", "--data", "d", "--json").json[0]["lag"] == 1


def test_metrics_and_health_are_served(tmp_path: Path, headrace: Headrace, start: Start):
    publish(headrace, 1, 2)
    process = start("silo", "silo.toml")
    address = ready(process)
    until_printed(tmp_path, process, 2)

    assert get(f"{address}/healthz") == (200, '{"state":"ok","problems":{}}\n')
    caught_up = 'headrace_lag_batches{provider="default",queue="0",subscription="printer"} 0.0'
    while caught_up not in (text := get(f"{address}/metrics?x=1")[1]):
        assert process.poll() is None, ended(process)
    for line in (
        'headrace_delivered_events_total{provider="default",subscription="printer"} 2.0',
        'headrace_queue_state{provider="default",queue="1",state="',
        'headrace_cache_pressure{provider="default",queue="0"} 0.0',
        'headrace_dead_letters_total{provider="default",subscription="printer"} 0.0',
        "process_resident_memory_bytes",
    ):
        assert f"\n{line}" in text
    assert get(f"{address}/other")[0] == 404


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /healthz HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK\r\n"),
        (b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200 OK\r\n"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed\r\n"),
        (b"\x00\xff\r\n\r\n", b"HTTP/1.1 400 Bad Request\r\n"),
        (b"GET / HTTP/1.1\r\n" + b"x" * 70_000, b"HTTP/1.1 400 Bad Request\r\n"),
        (b"GET /", b""),
    ],
)
def test_any_request_is_answered_or_hung_up_on(request_: bytes, status: bytes, start: Start):
    process = start("silo", "silo.toml")
    host, port = ready(process).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request_)
        answer = b""
        try:
            while more := connection.recv(65536):
                answer += more
        except ConnectionResetError:
            pass  # the silo does not read the part that it has no use for
    assert answer[: len(status) or None] == status
    assert get(f"http://{host}:{port}/healthz")[0] == 200


def test_a_port_in_use_is_one_line(headrace: Headrace):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = headrace("silo", "silo.toml", "--port", port).refused(1)
    assert refused == f"127.0.0.1:{port} is in use by another process, perhaps a silo: stop it, or name another port"


def test_an_unknown_option_is_one_line(tmp_path: Path, headrace: Headrace):
    (tmp_path / "silo.toml").write_text(CONFIG + "[providers.default.cach]\n")
    refused = headrace("silo", "silo.toml").refused(2)
    assert refused.startswith("silo.toml: [providers.default] cach: unknown option; accepted are adapter, queues")


def test_an_unknown_option_of_the_adapter_is_one_line(tmp_path: Path, headrace: Headrace):
    (tmp_path / "silo.toml").write_text(CONFIG + 'options = { durabilty = "commit" }\n')
    message = headrace("silo", "silo.toml").refused(2)
    assert message.startswith("silo.toml: [providers.default.options]: adapter 'log': durabilty: unknown option")
    assert message.endswith("did you mean 'durability'?")


def test_a_missing_file_is_one_line(headrace: Headrace):
    assert headrace("silo", "nowhere.toml").refused(1) == "nowhere.toml: No such file or directory"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere', at .*handlers.py:1: import nowhere$"),
        ("\n\n1 / 0", "ZeroDivisionError: division by zero, at .*handlers.py:3: 1 / 0$"),
        ("import sys\n\nsys.exit(3)", "SystemExit: 3, at .*handlers.py:3: sys.exit\\(3\\)$"),
        ("raise BaseException('stop')", "BaseException: stop, at .*handlers.py:1: raise"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E, at .*handlers.py:3: raise E$"),
        ("def f(:", "SyntaxError: invalid syntax, at .*handlers.py:1: def f\\(:$"),
        (
            "from headrace import subscription\n@subscription('a', 'b')\nasync def f(e): ...",
            "'b' selects no stream: .*, at .*handlers.py:2: @subscription",
        ),
        (
            "from headrace import subscription\n\n@subscription('a', 'b/c')\ndef f(e): ...",
            "handler f is a plain function: write async def f, at .*handlers.py:3: @subscription",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(code: str, reason: str, tmp_path: Path, headrace: Headrace):
    (tmp_path / "handlers.py").write_text(code)
    refused = headrace("silo", "silo.toml").refused(2)
    assert re.match(rf"module 'handlers' cannot be imported: .*{reason}", refused), refused


@pytest.mark.parametrize(
    ("given", "such_as"),
    [
        *(
            (file, ", such as 'handlers'")
            for file in ("handlers.py", "./handlers", "../a b/handlers.py", ".\\handlers.py")
        ),
        *((file, "") for file in (".handlers", "./", "..")),
    ],
)
def test_a_file_in_place_of_a_module_is_refused_with_the_module_s_name(given: str, such_as: str, headrace: Headrace):
    refused = headrace("silo", "silo.toml", "--module", given).refused(2)
    assert refused == (
        f"{given!r} is no name of a module: write one{such_as}, and run the command in the folder of its file"
    )


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ('retain_age_s = "1d"', 'retain_age_s = "1d": expected a number > 0'),
        ("retain_ages = 5", "retain_ages: unknown option; .*; did you mean 'retain_age_s'"),
    ],
)
def test_a_wrong_option_of_an_adapter_is_named_with_its_source(
    option: str, problem: str, tmp_path: Path, headrace: Headrace
):
    (tmp_path / "silo.toml").write_text(f'data = "data"\n[providers.default.options]\n{option}\n')
    refused = headrace("silo", "silo.toml").refused(2)
    assert re.match(rf"silo.toml: \[providers.default.options\]: adapter 'log': {problem}", refused), refused


def test_a_wrong_option_of_an_adapter_in_a_variable_is_named_with_it():
    error = InvalidArgument("adapter 'log': retain_age_s = \"1d\": no", option="[providers.default.options]")
    variable = "HEADRACE_PROVIDERS__DEFAULT__OPTIONS__RETAIN_AGE_S"
    named = str(named_source(error, Path("silo.toml"), {variable: "1d"}))
    assert named == f"{variable}: adapter 'log': retain_age_s = \"1d\": no"


def test_a_subscription_of_a_provider_that_is_not_configured_is_refused(tmp_path: Path, headrace: Headrace):
    (tmp_path / "handlers.py").write_text(HANDLERS.replace('"shop/*"', '"shop/*", provider="orders"'))
    assert headrace("silo", "silo.toml").refused(2) == (
        "subscription 'printer' is declared for provider 'orders', which is not configured: there is default"
    )


def test_a_second_silo_on_the_same_data_stands_by(tmp_path: Path, start: Start):
    process = start("silo", "silo.toml")
    ready(process)
    second = start("silo", "silo.toml")
    assert second.stderr is not None
    waiting = f"'printer' of provider 'default' is served by process {process.pid}: this process stands by".encode()
    assert any(waiting in line for line in second.stderr)
    ready(second)
    process.kill()
    process.wait()
    assert any(b"so this one takes over" in line for line in second.stderr)


def test_a_data_directory_that_is_needed_and_not_named_is_one_line(headrace: Headrace):
    refused = headrace("silo").refused(2)
    for name in ("'default' needs a data directory", "--data", "HEADRACE_DATA", "data ="):
        assert name in refused


def test_option_without_effect_is_warned_of(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ENVIRONMENT, "HEADRACE_MODULE", "handlers")
    process = start("silo", "--data", "d")
    assert process.stderr is not None
    said = b""
    while b"silo is ready" not in said:
        said += process.stderr.readline()

    assert b"WARNING headrace.silo: variable HEADRACE_MODULE is no option" in said
    assert b"WARNING headrace.silo: silo has no subscription to serve" in said
    assert f"silo is ready: data in {tmp_path / 'd'}; provider 'default' with 8 queues".encode() in said


def test_a_silo_may_only_move_an_outbox(tmp_path: Path, start: Start, headrace: Headrace):
    headrace("effects", "migrate", "sqlite:///shop.db")
    (tmp_path / "silo.toml").write_text('[providers.default]\noutbox = "sqlite:///shop.db"\n')
    process = start("silo", "silo.toml", "--data", "d")
    assert process.stderr is not None
    said = b""
    while b"silo is ready" not in said:
        said += process.stderr.readline()
    assert b"shop.db is moved into provider 'default'" in said
    assert b"WARNING" not in said


def test_without_modules_it_runs(headrace: Headrace, start: Start):
    process = start("silo", "--data", "d", "--port", "0")
    address = ready(process)
    assert json.loads(get(f"{address}/healthz")[1])["state"] == "ok"
    process.send_signal(signal.SIGTERM)
    assert ended(process).code == 0
