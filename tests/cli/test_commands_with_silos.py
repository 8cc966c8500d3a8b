"""`headrace ... --server`: the same as with `--data`, on a silo."""

from __future__ import annotations

import asyncio
import fcntl
import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace import Event, Mode, OnFailure, RetryPolicy, Start, StreamId, SyncClient
from headrace.cli.main import main
from headrace.silo.provider import Provider
from tests.certificates import Authority
from tests.cli.commandline import ENVIRONMENT, Headrace, Ran, ended
from tests.cli.commandline import Start as StartProcess
from tests.cli.conftest import start
from tests.cli.forking import CONNECT_S
from tests.client.silos import SiloProcess, Silos, stored
from tests.silo.talking import silos as cluster_of

__all__ = ("start",)

STREAM = ["--stream", "n/k", "--format", "raw"]
S = StreamId("n", "k")
IMPATIENT = {CONNECT_S: "1"}
"""For commands that no silo will answer."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(ENVIRONMENT, "XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "headrace"


def events_of(silo: SiloProcess) -> list[bytes]:
    silo.stop()
    return asyncio.run(stored(silo.data)).get(S, [])


def lines(count: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(count))


# ---- where -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "Missing option '--data' or '--server'."),
        (["--data", "d", "--server", "localhost:1"], "--data and --server exclude each other"),
        (["--data", "d", "--token", "x"], "--token is for --server, not for --data"),
        (["--data", "d", "--ca", "x"], "--ca is for --server, not for --data"),
        (["--server", "nowhere"], "'nowhere' is no address: write it as host:port"),
        (["--server", "localhost:1", "--key", "x"], "a client certificate and its key go together"),
        (["--server", "10.0.0.1:1", "--token", "x"], "the token would go to 10.0.0.1:1 unencrypted"),
    ],
)
def test_a_place_is_a_data_directory_or_a_silo(headrace: Headrace, arguments: list[str], why: str):
    assert why in headrace("subscriptions", "list", *arguments).refused(2)


def test_provider_options_are_refused_for_a_silo(headrace: Headrace):
    for flag, value in (("--adapter", "log"), ("--queues", "2"), ("--option", "a=b")):
        ran = headrace("publish", "--server", "localhost:1", *STREAM, flag, value)
        assert f"{flag} is for --data" in ran.refused(2)


@pytest.mark.long
def test_option_goes_before_variables(headrace: Headrace, silo: SiloProcess):
    listed = ("subscriptions", "list", "--json")
    assert headrace(*listed, HEADRACE_SERVER=silo.address).json == []
    assert headrace(*listed, "--server", silo.address, HEADRACE_DATA="d").json == []
    assert "exclude each other" in headrace(*listed, HEADRACE_SERVER=silo.address, HEADRACE_DATA="d").refused(2)
    silo.stop()
    assert headrace(*listed, "--data", "d", HEADRACE_SERVER=silo.address, HEADRACE_TOKEN="x").json == []


def test_command_to_a_closed_port_fails_in_one_line(headrace: Headrace):
    assert "no silo answers at 127.0.0.1:1" in headrace(
        "subscriptions", "list", "--server", "127.0.0.1:1", **IMPATIENT
    ).refused(1)


def test_an_unknown_provider_is_one_line(headrace: Headrace, silo: SiloProcess):
    ran = headrace("publish", "--server", silo.address, "--provider", "other", *STREAM, stdin=b"x\n")
    assert ran.refused(1) == "this silo has no provider 'other': name one of its configuration"


@pytest.mark.long
def test_a_token_is_needed_and_taken_from_the_variable(headrace: Headrace, silos: Silos):
    made = headrace("tokens", "create", "t", "--data", "d", "--publish", "n").out.strip()
    silo = silos("--auth", "tokens")
    publish = ("publish", "--server", silo.address, "--format", "raw")
    assert "--token or HEADRACE_TOKEN: the silo at" in headrace(*publish, "--stream", "n/k", stdin=b"x\n").refused(1)
    assert headrace(*publish, "--stream", "n/k", stdin=b"0\n", HEADRACE_TOKEN=made).code == 0
    assert headrace(*publish, "--stream", "n/k", "--token", made, stdin=b"1\n").code == 0
    assert "may not publish to namespace 'other'" in headrace(
        *publish, "--stream", "other/k", "--token", made, stdin=b"1\n"
    ).refused(1)
    assert events_of(silo) == [b"0", b"1"]


@pytest.mark.long
def test_tls_trusts_the_given_certificate(headrace: Headrace, silos: Silos, tmp_path: Path):
    authority = Authority(tmp_path)
    own, client = authority.issue("localhost", "127.0.0.1"), authority.issue("client.example")
    trusted = str(authority.certificate)
    silo = silos("--certificate", str(own.certificate), "--key", str(own.key), "--client-ca", trusted)
    listed = ("subscriptions", "list", "--json", "--server", silo.address)
    assert headrace(*listed, "--ca", trusted, "--certificate", client.certificate, "--key", client.key).json == []
    says = "whether it requires TLS (--ca FILE or --tls) or a client's certificate (--certificate)"
    assert says in headrace(*listed, **IMPATIENT).refused(1)
    assert says in headrace(*listed, "--ca", trusted, **IMPATIENT).refused(1)
    assert "is not trusted: give the certificate of its authority" in headrace(*listed, "--tls", **IMPATIENT).refused(1)
    assert (
        headrace(*listed[:-1], "192.0.2.1:1", "--token", "hr_x")
        .refused(2)
        .endswith("unencrypted: use --ca FILE or --tls, or --insecure in a network you trust")
    )
    assert "--ca: missing.pem: No such file" in headrace(*listed, "--ca", "missing.pem").refused(2)


# ---- publish ---------------------------------------------------------------------------------------------------------


def test_a_file_is_published(headrace: Headrace, silo: SiloProcess, tmp_path: Path, state: Path):
    (tmp_path / "f").write_bytes(lines(20_000))
    result = headrace("publish", "--server", silo.address, *STREAM, "--json", "f").json
    assert (result["events"], result["lines"], result["skipped_lines"]) == (20_000, 20_000, 0)
    assert not [*state.glob("*.json")]
    assert headrace("publish", "--server", silo.address, *STREAM, stdin=b"last").code == 0
    assert events_of(silo) == [b"%d" % number for number in range(20_000)] + [b"last"]


@pytest.mark.long
def test_every_line_may_go_to_another_stream(headrace: Headrace, silo: SiloProcess, tmp_path: Path):
    (tmp_path / "f").write_bytes(b"".join(b'{"k":%d}\n' % number for number in range(20_000)))
    form = ["--namespace", "n", "--key-field", "k"]
    assert headrace("publish", "--server", silo.address, *form, "--json", "f").json["events"] == 20_000
    silo.stop()
    assert len(asyncio.run(stored(silo.data))) == 20_000


@pytest.mark.long
def test_after_mending_a_line_nothing_is_doubled(headrace: Headrace, silo: SiloProcess, tmp_path: Path):
    file = tmp_path / "f"
    publish = ("publish", "--server", silo.address, "--stream", "n/k", "f")
    file.write_bytes(b"1\n2\nno\n4\n")
    assert headrace(*publish).refused(1).startswith("f:3: not JSON")
    file.write_bytes(b"1\n2\n3\n4\n")
    ran = headrace(*publish)
    assert "f: continuing after line 2: an earlier run published the lines up to it" in ran.err
    assert ran.code == 0
    file.write_bytes(b"1\n2\nno\n")
    headrace(*publish)
    file.write_bytes(b"1\n5\nno\n")
    assert "f: lines up to 2 have changed since" in headrace(*publish).err
    assert events_of(silo) == [b"1", b"2", b"3", b"4", b"1", b"2", b"1", b"5"]


@pytest.mark.long
def test_a_killed_publisher_and_a_killed_silo_publish_every_line_once(
    headrace: Headrace, start: StartProcess, silo: SiloProcess, tmp_path: Path, state: Path
):
    (tmp_path / "f").write_bytes(lines(60_000))
    chance = random.Random(7)
    publish = ("publish", "--server", silo.address, *STREAM, "f")
    for round_ in range(4):
        publisher = start(*publish)
        goal = journaled(state) + chance.randrange(1, 3) * 4096
        while journaled(state) < goal and publisher.poll() is None:
            pass
        if round_ % 2:
            silo.kill()
            silo.start()
        publisher.kill()
        ended(publisher)
    assert headrace(*publish).code == 0
    assert events_of(silo) == [b"%d" % number for number in range(60_000)]


@pytest.mark.long
def test_by_other_addresses_of_the_same_cluster_it_goes_on(headrace: Headrace, tmp_path: Path, state: Path):
    file = tmp_path / "f"
    with cluster_of(tmp_path, "ab") as (a, b):

        def publish(addresses: str, good: int) -> Ran:
            """The file, in which all lines but so many are still wrong."""
            file.write_bytes(b"".join(b"%d\n" % number if number < good else b"no\n" for number in range(4)))
            return headrace("publish", "--server", addresses, "--stream", "n/k", "f")

        assert publish(f"{a.address},{b.address}", 1).code == 1
        assert "continuing after line 1:" in publish(f"{b.address},{a.address}", 2).err
        assert "continuing after line 2:" in publish(b.address, 3).err
        assert "continuing after line 3:" in publish(a.address.replace("127.0.0.1", "localhost"), 4).err
        assert not [*state.glob("*.json")]
        for silo in (a, b):
            silo.signal(signal.SIGTERM)
            assert silo.talking.ended() == 0
    assert asyncio.run(stored(tmp_path / "data"))[S] == [b"0", b"1", b"2", b"3"]


@pytest.mark.long
def test_another_cluster_gets_the_whole_file(headrace: Headrace, silos: Silos, tmp_path: Path, state: Path):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    file, one, other = tmp_path / "f", silos(folder="one"), silos(folder="other")

    def publish(silo: SiloProcess, text: bytes) -> Ran:
        file.write_bytes(text)
        return headrace("publish", "--server", silo.address, "--stream", "n/k", "f")

    assert publish(one, b"1\n2\nno\n").code == 1
    assert "already" not in publish(other, b"1\nno\n").err
    assert "continuing after line 2:" in publish(one, b"1\n2\n3\n").err
    assert "continuing after line 1:" in publish(other, b"1\n2\n3\n").err
    assert not [*state.glob("*.json")]
    assert events_of(one) == events_of(other) == [b"1", b"2", b"3"]


@pytest.mark.long
def test_a_run_that_the_log_of_a_silo_has_forgotten_is_known_by_its_addresses(
    headrace: Headrace, silo: SiloProcess, tmp_path: Path, state: Path
):
    (tmp_path / "f").write_bytes(b"1\n2\nno\n")
    publish = ("publish", "--stream", "n/k", "f", "--server")
    assert headrace(*publish, silo.address).code == 1
    (path,) = state.glob("*.json")
    noted = json.loads(path.read_text())
    path.write_text(json.dumps(noted | {"producer": "forgotten", "done": noted["next"]}))
    (tmp_path / "f").write_bytes(b"1\n2\n3\n")
    refused = headrace(*publish, f"{silo.address},127.0.0.1:1").refused(1)
    assert "published the lines up to 2, but the queue does not know that run " in refused
    assert events_of(silo) == [b"1", b"2"]


def journaled(state: Path) -> int:
    """Up to which line the journal says that it goes."""
    for file in state.glob("*.json"):
        try:
            return json.loads(file.read_text())["next"]["lines"]
        except FileNotFoundError:
            continue
    return 0


def test_a_file_is_not_published_twice_at_once(headrace: Headrace, silo: SiloProcess, tmp_path: Path, state: Path):
    (tmp_path / "f").write_bytes(b"1\nno\n")
    publish = ("publish", "--server", silo.address, "--stream", "n/k", "f")
    headrace(*publish)
    (path,) = (state / "locks" / ".publish").iterdir()
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "'f' is being published already by process" in headrace(*publish).refused(1)


def test_without_a_journal_publish_warns_and_publishes(headrace: Headrace, silo: SiloProcess, tmp_path: Path):
    (tmp_path / "f").write_bytes(lines(3))
    (tmp_path / "state").write_bytes(b"a file")
    ran = headrace("publish", "--server", silo.address, *STREAM, "f")
    assert "cannot be used" in ran.err
    assert ran.code == 0
    assert events_of(silo) == [b"0", b"1", b"2"]


# ---- subscriptions and dead letters ----------------------------------------------------------------------------------


async def fail(event: Event) -> None:
    raise ValueError(event.payload.decode())


async def leave_behind(data: Path) -> None:
    """A subscription with dead letters, one with paused streams, and one with gaps."""
    once = RetryPolicy(max_attempts=1)
    async with Provider.open(data) as provider:
        for name, policy in (
            ("letters", OnFailure.DEAD_LETTER), ("paused", OnFailure.PAUSE), ("gaps", OnFailure.SKIP)
        ):  # fmt: skip
            await provider.subscribe(name, "n/*", fail, start=Start.earliest(), retry=once, on_failure=policy)
        for key in range(4):
            await provider.publish(StreamId("n", str(key)), [b"0", b"1"])
        for name in ("letters", "paused", "gaps"):
            await provider.caught_up(name)


SAME = """
subscriptions list
subscriptions list --json
subscriptions show letters --json
subscriptions show paused
subscriptions show missing
subscriptions create letters n/* --json
subscriptions create gaps n/*
subscriptions delete missing
subscriptions seek missing earliest --json
subscriptions resume paused n/9
deadletters list
deadletters list --json
deadletters list --subscription letters --limit 3
deadletters list --subscription missing
deadletters list --after 2 --json
deadletters show 1 --json
deadletters show 0
deadletters show 77
deadletters redrive --subscription letters 1 99
deadletters redrive --subscription missing --all
deadletters redrive --subscription letters 1 2
deadletters list --json
deadletters delete --subscription letters 99
deadletters delete --subscription letters 1
"""


@pytest.mark.long
def test_a_silo_answers_as_a_data_directory(
    silo: SiloProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for variable in ("HEADRACE_SERVER", "HEADRACE_DATA", "HEADRACE_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    silo.stop()
    asyncio.run(leave_behind(silo.data))
    shutil.copytree(silo.data, tmp_path / "copy")
    silo.start()

    def run(*arguments: str) -> Ran:
        capfd.readouterr()
        code = main(arguments)
        said = capfd.readouterr()
        return Ran(code, said.out, said.err)

    for command in SAME.strip().splitlines():
        on_data = run(*command.split(), "--data", str(tmp_path / "copy"))
        assert (command, run(*command.split(), "--server", silo.address)) == (command, on_data)


@pytest.mark.long
def test_subscriptions_are_changed_on_a_silo(headrace: Headrace, silo: SiloProcess):
    at = ["--server", silo.address]
    assert headrace("subscriptions", "create", "s", "n/*", *at).err == "headrace: subscription 's' is created\n"
    assert headrace("subscriptions", "create", "s", "n/*", *at, "--json").json == {"name": "s", "created": False}
    headrace("publish", *STREAM, *at, stdin=b"x\n")
    (one,) = headrace("subscriptions", "list", *at, "--json").json
    assert (one["name"], one["lag"]) == ("s", 1)
    assert headrace("subscriptions", "seek", "s", "latest", *at, "--json").json == {
        "name": "s", "moved": True, "not_moved": 0,
    }  # fmt: skip
    assert headrace("subscriptions", "show", "s", *at, "--json").json["lag"] == 0
    assert headrace("subscriptions", "delete", "s", *at).err == "headrace: subscription 's' is deleted\n"
    assert headrace("subscriptions", "list", *at, "--json").json == []


@pytest.mark.long
def test_a_seek_says_how_many_consumers_it_did_not_move(headrace: Headrace, silo: SiloProcess):
    command = ("subscriptions", "seek", "s", "latest", "--server", silo.address)
    options: dict[str, Any] = {"mode": Mode.BROADCAST, "start": "earliest", "keeps_positions": True}
    with SyncClient(silo.address) as client:
        client.publish(StreamId("n", "1"), b"x")
        with client.subscribe("s", "n/*", **options) as consumer:
            consumer.take(timeout_s=30)
            assert headrace(*command).err.splitlines() == [
                "headrace: subscription 's' is moved",
                "headrace: consumers that keep their positions and were not moved: 1; start them with other positions",
            ]
            assert headrace(*command, "--json").json == {"name": "s", "moved": True, "not_moved": 1}
            assert consumer.seek("latest") == 1


@pytest.mark.long
def test_dead_letters_are_changed_on_a_silo(headrace: Headrace, silo: SiloProcess):
    silo.stop()
    asyncio.run(leave_behind(silo.data))
    silo.start()
    at = ["--server", silo.address, "--json"]
    letters = headrace("deadletters", "list", *at).json
    assert len(letters) == 8
    of = ["--subscription", "letters"]
    assert headrace("deadletters", "redrive", *of, letters[0]["id"], *at).json["asked_for"] == 1
    assert [one["redrive"] for one in headrace("deadletters", "list", *at).json] == [True] + [False] * 7
    assert headrace("deadletters", "delete", *of, letters[0]["id"], *at).json["deleted"] == 1
    assert headrace("deadletters", "delete", *of, "--all", *at).json["deleted"] == 7
    resumed = headrace("subscriptions", "resume", "paused", "n/1", *at).json
    assert resumed == {"name": "paused", "resumed": True}
