"""`headrace subscribe --server`: prints events of a silo, and an event counts as done once its line is written."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from headrace import Event, StreamId, SyncClient
from tests.cli.commandline import Headrace, Ran, Start, ended
from tests.cli.conftest import start
from tests.cli.forking import Process
from tests.client.silos import SiloProcess, Silos

__all__ = ("start",)

S = StreamId("shop", "log")
STORED = ["--from", "earliest", "--no-follow"]


@pytest.fixture
def subscribe(headrace: Headrace, silo: SiloProcess) -> Headrace:
    def run(*arguments: object) -> Ran:
        return headrace("subscribe", "--server", silo.address, "shop/*", *arguments)

    return run


def publish(silo: SiloProcess, *numbers: int, stream: StreamId = S) -> None:
    with SyncClient(silo.address) as client:
        for number in numbers:
            client.publish(stream, b"%d" % number)


def names(silo: SiloProcess) -> list[str]:
    with SyncClient(silo.address) as client:
        return [definition.name for definition in client.subscriptions()]


def raw(ran: Ran) -> list[int]:
    assert ran.code == 0, ran
    return [int(line) for line in ran.out.splitlines()]


def next_line(process: Process) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.long
def test_output_is_the_same_as_from_a_data_directory(headrace: Headrace, silo: SiloProcess, subscribe: Headrace):
    with SyncClient(silo.address) as client:
        events = [Event(b"0", timestamp_us=0), Event("ü\n".encode(), headers={"a": "b"}, id="i", timestamp_us=1)]
        client.publish(S, events)
        client.publish(StreamId("other", "k"), b"no")
    forms = [[], ["--json"], ["--format", "raw"]]
    on_silo = [subscribe(*STORED, *form) for form in forms]
    assert names(silo) == []
    silo.stop()
    assert on_silo == [headrace("subscribe", "--data", "d", "shop/*", *STORED, *form) for form in forms]
    assert len(on_silo[0].out.splitlines()) == 2


@pytest.mark.long
def test_several_filters_pass_only_events_that_all_accept(silo: SiloProcess, subscribe: Headrace):
    with SyncClient(silo.address) as client:
        client.publish(S, [Event(b'{"n":%d}' % (number % 3), headers={"h": str(number % 2)}) for number in range(12)])
    both = ("--filter", "field:n=1", "--filter", "header:h=0")
    assert subscribe(*STORED, *both, "--format", "raw").out == '{"n":1}\n' * 2
    assert subscribe(*STORED, *both, "--max", 1).out.count("\n") == 1
    assert "write it as header:NAME=VALUE" in subscribe("--filter", "x").refused(2)


@pytest.mark.long
def test_a_name_goes_on_where_it_was_and_a_limit_leaves_the_rest(silo: SiloProcess, subscribe: Headrace):
    with SyncClient(silo.address) as client:
        client.publish(S, [b"%d" % number for number in range(10)])
        client.publish(S, [b"10", b"11"])
    form = ("--name", "s", "--format", "raw")
    assert raw(subscribe("--from", "earliest", *form, "--max", 4)) == [0, 1, 2, 3]
    assert raw(subscribe(*form, "--max", 7)) == [*range(4, 11)]
    assert raw(subscribe(*form, "--no-follow")) == [11]
    assert raw(subscribe(*form, "--no-follow")) == []
    assert "exists with another" in subscribe(*form, "--from", "latest").refused(1)
    assert names(silo) == ["s"]


@pytest.mark.long
def test_remains_of_a_killed_process_are_forgotten(silos: Silos, start: Start, headrace: Headrace):
    silo = silos()
    process = start("subscribe", "--server", silo.address, "shop/*", "--from", "earliest", "--format", "raw")
    publish(silo, 0)
    assert next_line(process) == b"0\n"
    process.kill()
    ended(process)
    assert [name.startswith("ephemeral-") for name in names(silo)] == [True]
    silo.kill()  # or else its consumer would be waited for
    silo.start()
    assert raw(headrace("subscribe", "--server", silo.address, "shop/*", *STORED, "--format", "raw")) == [0]
    assert names(silo) == []


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_it_in_order(number: signal.Signals, code: int, silo: SiloProcess, start: Start):
    process = start("subscribe", "--server", silo.address, "shop/*", "--from", "earliest", "--format", "raw")
    publish(silo, 0)
    assert next_line(process) == b"0\n"
    process.send_signal(number)
    assert ended(process).code == code
    assert names(silo) == []


@pytest.mark.long
def test_restarts_of_the_silo_go_unnoticed(silo: SiloProcess, start: Start, headrace: Headrace):
    following = ("subscribe", "--server", silo.address, "shop/*", "--name", "s", "--format", "raw")
    process = start(*following, "--from", "earliest")
    for number in range(3):
        publish(silo, number)
        assert next_line(process) == b"%d\n" % number
        silo.kill()
        silo.start()
    process.send_signal(signal.SIGTERM)
    ran = ended(process)
    notes = ["headrace: lost the silo, reconnecting", "headrace: connected again"] * 3
    assert (ran.out, ran.err.splitlines()) in [("", notes), ("", notes[:-1])]
    assert raw(headrace(*following, "--no-follow")) == []


@pytest.mark.long
def test_killed_it_loses_nothing(silo: SiloProcess, start: Start, headrace: Headrace):
    following = ("subscribe", "--server", silo.address, "shop/*", "--name", "s", "--format", "raw")
    publish(silo, *range(5))
    printed: set[int] = set()
    for number in range(5, 7):
        process = start(*following, "--from", "earliest")
        publish(silo, number)  # the process before may have finished all others
        printed.add(int(next_line(process)))
        process.kill()
        printed |= {int(line) for line in ended(process).out.split()}
        silo.kill()
        silo.start()
    printed |= set(raw(headrace(*following, "--no-follow")))
    assert printed == {*range(7)}


@pytest.mark.long
def test_commands_with_one_name_share_the_events(silo: SiloProcess, start: Start):
    following = ("subscribe", "--server", silo.address, "shop/*", "--name", "s", *STORED[:2], "--format", "raw")
    processes = [start(*following), start(*following)]
    with SyncClient(silo.address) as client:
        while len(consumers(client)) < 2:
            pass
        for number in range(200):
            client.publish(StreamId("shop", str(number)), b"%d" % number)
        client.caught_up("s")
    printed: list[int] = []
    for process in processes:
        process.send_signal(signal.SIGTERM)
        printed += [int(line) for line in ended(process).out.split()]
    assert sorted(printed) == [*range(200)]


def consumers(client: SyncClient) -> Any:
    return client.subscription("s").consumers if client.subscriptions() else ()


def test_it_ends_when_its_subscription_is_taken_away(silo: SiloProcess, start: Start):
    process = start("subscribe", "--server", silo.address, "shop/*", "--name", "s", "--from", "earliest")
    publish(silo, 0)
    next_line(process)
    with SyncClient(silo.address) as client:
        client.delete_subscription("s")
    ran = ended(process)
    assert (ran.code, "'s'" in ran.err) == (1, True)


@pytest.mark.long
def test_caller_that_may_only_subscribe_leaves_nothing_behind(headrace: Headrace, silos: Silos):
    made = headrace("tokens", "create", "t", "--data", "d", "--subscribe", "shop", "--publish", "shop").out.strip()
    silo = silos("--auth", "tokens")
    at = ("--server", silo.address, "--token", made)
    assert headrace("publish", *at, "--stream", "shop/log", "--format", "raw", stdin=b"0\n").code == 0
    ran = headrace("subscribe", *at, "shop/*", *STORED, "--format", "raw")
    assert (raw(ran), ran.err) == ([0], "")
    assert "may not subscribe" in headrace("subscribe", *at, "other/*", "--no-follow").refused(1)
    assert headrace("subscribe", *at, "shop/*", "--name", "s", *STORED, "--format", "raw").out == "0\n"
    silo.stop()
    listed = headrace("subscriptions", "list", "--data", "d", "--json").json
    assert [one["name"] for one in listed] == ["s"]
