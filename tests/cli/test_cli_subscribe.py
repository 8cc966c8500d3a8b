"""`headrace subscribe`: prints events, and an event counts as done once its line is written."""

import fcntl
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace import Event, Provider, StreamId
from tests.cli.commandline import Headrace, Ran, Start, ended
from tests.cli.forking import Process

ALL = ["subscribe", "--data", "d", "shop/*"]
EARLIEST = [*ALL, "--from", "earliest"]
STORED = [*EARLIEST, "--no-follow"]


def publish(headrace: Headrace, *numbers: int, stream: str = "shop/log") -> None:
    lines = b"".join(b"%d\n" % number for number in numbers)
    assert headrace("publish", "--data", "d", "--stream", stream, stdin=lines).code == 0


def numbers(ran: Ran) -> list[int]:
    return [int(line) for line in ran.out.splitlines()]


def names(headrace: Headrace) -> list[str]:
    return [one["name"] for one in headrace("subscriptions", "list", "--data", "d", "--json").json]


def next_line(process: Process) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest_asyncio.fixture
async def provider(tmp_path: Path) -> AsyncIterator[Provider]:
    async with Provider.open(tmp_path / "d") as provider:
        yield provider


async def test_every_part_of_an_event_is_printed_as_json(provider: Provider, headrace: Headrace):
    events = [
        Event(b"plain", timestamp_us=0),
        Event("grün\n".encode(), headers={"kind": "colour"}, id="e2", timestamp_us=1_500_000),
        Event(b"\xff\x00", timestamp_us=1 << 57),
    ]
    await provider.stream("shop", "a/b").publish(events)
    at = {"stream": "shop/a/b", "queue": provider.queue_of(StreamId("shop", "a/b"))}

    assert headrace(*STORED, "--json").events == [
        {**at, "token": "0", "timestamp": "1970-01-01T00:00:00+00:00", "id": None, "headers": {},
         "payload": "plain"},
        {**at, "token": "0.1", "timestamp": "1970-01-01T00:00:01.500000+00:00", "id": "e2",
         "headers": {"kind": "colour"}, "payload": "grün\n"},
        {**at, "token": "0.2", "timestamp": "6536-10-29T20:41:15.855872+00:00", "id": None, "headers": {},
         "payload": "/wA=",
         "encoding": "base64"},
    ]  # fmt: skip


async def test_text_is_one_line_per_event(provider: Provider, headrace: Headrace):
    await provider.stream("shop", "log").publish([b"one", b"two\nlines\r", b"\xff"])
    assert headrace(*STORED).out == "shop/log 0 one\nshop/log 0.1 two\\nlines\\r\nshop/log 0.2 \\xff\n"


@pytest.mark.long
async def test_several_filters_pass_only_events_that_all_accept(provider: Provider, headrace: Headrace):
    def event(kind: str, **fields: Any) -> Event:
        return Event(json.dumps(fields).encode(), headers={"kind": kind})

    await provider.stream("shop", "log").publish(
        [
            event("a", n=1, who="ann", good=True),
            event("b", n=2, who="ann"),
            event("a", n=3, who="bob"),
            Event(b"no json", headers={"kind": "a"}),
            Event(b"[1]"),
            Event(b"[" * 1500 + b"]" * 1500),
        ]
    )

    def passing(*filters: str) -> list[Any]:
        given = [option for text in filters for option in ("--filter", text)]
        lines = headrace(*STORED, "--format", "raw", *given).out.splitlines()
        return [json.loads(line)["n"] if line.startswith("{") else line for line in lines]

    assert passing("header:kind=a") == [1, 3, "no json"]
    assert passing("field:who=ann") == [1, 2]
    assert passing("field:n=2") == [2]
    assert passing("field:good=true") == [1]
    assert passing("header:kind=a", "field:who=ann") == [1]
    assert passing("field:who=") == []


@pytest.mark.long
def test_only_selected_events_are_printed(headrace: Headrace):
    publish(headrace, 1, stream="shop/a")
    publish(headrace, 2, stream="shop/b")
    publish(headrace, 3, stream="yard/a")
    for selector, expected in (("shop/a", [1]), ("shop/*", [1, 2]), ("*/a", [1, 3]), ("yard/?", [3]), ("x/*", [])):
        ran = headrace("subscribe", "--data", "d", selector, "--from", "earliest", "--no-follow", "--format", "raw")
        assert sorted(numbers(ran)) == expected


@pytest.mark.long
def test_it_starts_where_it_is_told_to(headrace: Headrace):
    publish(headrace, 1, 2, 3)
    publish(headrace, 4)
    one = ["subscribe", "--data", "d", "shop/log", "--no-follow", "--format", "raw", "--from"]

    assert numbers(headrace(*one, "0.1")) == [2, 3, 4]
    assert numbers(headrace(*one, "1")) == [4]
    assert numbers(headrace(*one, "latest")) == []
    assert numbers(headrace(*one, "2001-01-01T00:00:00Z")) == [1, 2, 3, 4]
    assert numbers(headrace(*one, "2101-01-01T00:00:00Z")) == []


@pytest.mark.long
def test_a_named_subscription_goes_on_where_it_was(headrace: Headrace):
    publish(headrace, *range(10))
    named = [*EARLIEST, "--name", "printer", "--format", "raw"]

    assert numbers(headrace(*named, "--max", "4")) == [0, 1, 2, 3]
    assert numbers(headrace(*named, "--max", "1")) == [4]
    publish(headrace, 10)
    assert numbers(headrace(*named, "--no-follow")) == [5, 6, 7, 8, 9, 10]
    assert numbers(headrace(*named, "--no-follow")) == []
    assert names(headrace) == ["printer"]


@pytest.mark.long
def test_a_limit_over_many_streams_leaves_all_others_undone(headrace: Headrace):
    lines = b"".join(b'{"k":"%d","n":%d}\n' % (n % 37, n) for n in range(500))
    headrace("publish", "--data", "d", "--namespace", "shop", "--key-field", "k", stdin=lines)
    printed: list[int] = []
    for _ in range(5):
        ran = headrace(*EARLIEST, "--name", "printer", "--format", "raw", "--max", "60")
        printed += [json.loads(line)["n"] for line in ran.out.splitlines()]
    assert len(printed) == 300
    rest = headrace(*EARLIEST, "--name", "printer", "--format", "raw", "--no-follow")
    printed += [json.loads(line)["n"] for line in rest.out.splitlines()]

    assert sorted(printed) == list(range(500))
    for key in range(37):
        of_stream = [n for n in printed if n % 37 == key]
        assert of_stream == sorted(of_stream)


@pytest.mark.long
def test_a_name_keeps_its_start_and_refuses_another(headrace: Headrace):
    publish(headrace, 1)
    assert numbers(headrace(*EARLIEST, "--name", "printer", "--format", "raw", "--no-follow")) == [1]
    publish(headrace, 2)

    assert numbers(headrace(*ALL, "--name", "printer", "--format", "raw", "--no-follow")) == [2]
    assert "exists with another definition: start is" in headrace(
        *ALL, "--name", "printer", "--from", "latest", "--no-follow"
    ).refused(1)
    assert "exists with another definition: filter is" in headrace(
        *ALL, "--name", "printer", "--filter", "header:a=b", "--no-follow"
    ).refused(1)


@pytest.mark.parametrize("name", ["mail~eu", ""])
def test_a_name_that_no_subscription_may_have_is_refused(name: str, headrace: Headrace):
    message = headrace(*STORED, "--name", name, "--adapter", "log").refused(2)
    assert message.startswith(f"'{name}' is not a subscription name: letters, digits")


def test_without_a_name_nothing_is_kept(headrace: Headrace):
    publish(headrace, 1)
    headrace(*STORED)
    assert names(headrace) == []


@pytest.mark.long
def test_remains_of_a_killed_process_are_forgotten(headrace: Headrace, start: Start):
    publish(headrace, 1)
    process = start(*EARLIEST, "--format", "raw")
    assert next_line(process) == b"1\n"
    living = start(*EARLIEST, "--format", "raw")
    assert next_line(living) == b"1\n"
    process.kill()
    process.wait()
    assert len(names(headrace)) == 2

    headrace(*STORED)

    assert len(names(headrace)) == 1
    publish(headrace, 2)
    assert next_line(living) == b"2\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_it_in_order(number: signal.Signals, code: int, headrace: Headrace, start: Start):
    publish(headrace, 1)
    process = start(*EARLIEST, "--name", "printer", "--format", "raw")
    assert next_line(process) == b"1\n"
    publish(headrace, 2)
    assert next_line(process) == b"2\n"
    process.send_signal(number)

    assert ended(process) == (code, "", "headrace: interrupted\n" if code else "")
    publish(headrace, 3)
    assert numbers(headrace(*EARLIEST, "--name", "printer", "--format", "raw", "--no-follow")) == [3]


def test_killed_it_loses_nothing(headrace: Headrace, start: Start):
    publish(headrace, *range(1000))
    process = start(*EARLIEST, "--name", "printer", "--format", "raw")
    printed = {int(next_line(process)) for _ in range(500)}
    process.kill()
    process.wait()

    printed |= set(numbers(headrace(*EARLIEST, "--name", "printer", "--format", "raw", "--no-follow")))
    assert printed == set(range(1000))


@pytest.mark.long
def test_one_name_is_served_by_one_process(headrace: Headrace, start: Start):
    publish(headrace, 1)
    process = start(*EARLIEST, "--name", "printer", "--format", "raw")
    assert next_line(process) == b"1\n"

    refused = headrace(*EARLIEST, "--name", "printer", "--no-follow").refused(1)

    assert refused == (
        f"subscription 'printer' of provider 'default' is served by process {process.pid}: stop that one first"
    )
    assert numbers(headrace(*EARLIEST, "--name", "other", "--format", "raw", "--no-follow")) == [1]


async def test_it_ends_when_its_subscription_is_taken_away(provider: Provider, headrace: Headrace, start: Start):
    await provider.stream("shop", "log").publish(b"1")
    process = start(*EARLIEST, "--name", "printer", "--format", "raw")
    assert next_line(process) == b"1\n"
    await provider.store.delete_subscription("default", "printer")
    await provider.stream("shop", "log").publish(b"2")

    ran = ended(process)
    assert ran.code == 1
    assert "subscription 'printer' was moved, deleted or taken over elsewhere" in ran.err


def test_a_reader_that_stopped_reading_does_not_keep_it_from_stopping(headrace: Headrace, start: Start):
    headrace("publish", "--data", "d", "--stream", "shop/log", "--format", "raw", stdin=(b"x" * 1000 + b"\n") * 1000)
    process = start(*EARLIEST, "--name", "printer", "--format", "raw")
    assert process.stdout is not None
    until_full(process.stdout.fileno())
    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 0
    assert process.stderr is not None
    assert b"did not end within" in process.stderr.read()


def until_full(pipe: int) -> None:
    """Wait until a pipe is full: a writer blocks now."""
    capacity = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    waiting = bytearray(4)
    while int.from_bytes(waiting, "little") < capacity - os.sysconf("SC_PAGESIZE"):
        fcntl.ioctl(pipe, 0x541B, waiting)  # FIONREAD
        time.sleep(0.001)
