"""`headrace publish`: lines become events, each exactly once, whatever happens in between."""

import json
import os
import random
import shlex
import signal
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace import InvalidArgument, Provider, StreamId
from headrace.cli.commands.journal import ControlStoreJournals, FilePosition, FileReader, PublishJournal, journal_key
from headrace.cli.commands.lines import LineFormat
from headrace.store.datadir import lock, open_data_directory
from tests.cli.commandline import ENVIRONMENT, SCRIPT, Headrace, Start, ended
from tests.cli.forking import Process, forking

BY_KEY = ["--data", "d", "--namespace", "shop", "--key-field", "who"]
TO_ONE = ["--data", "d", "--stream", "shop/log"]


def order(number: int, who: str = "ann", **more: Any) -> bytes:
    return json.dumps({"n": number, "who": who, **more}).encode() + b"\n"


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(lines))
    return path


def stored(headrace: Headrace, selector: str = "*/*") -> list[dict[str, Any]]:
    """All events of the data directory."""
    return headrace("subscribe", "--data", "d", selector, "--from", "earliest", "--no-follow", "--json").events


def payloads(headrace: Headrace, selector: str = "*/*") -> list[str]:
    return [event["payload"] for event in stored(headrace, selector)]


def count(headrace: Headrace) -> int:
    return sum(stream["events"] for stream in headrace("streams", "--data", "d", "--json").json)


@pytest.mark.long
def test_each_line_goes_to_the_stream_of_its_key(headrace: Headrace):
    lines = [order(1, "ann"), order(2, "bob"), order(3, "ann"), b'{"who": 7, "n":4}\r\n', b"\n", b'{"who":"bob"}']
    result = headrace("publish", *BY_KEY, "--json", stdin=b"".join(lines)).json

    assert (result["events"], result["lines"], result["skipped_lines"]) == (5, 6, 0)
    assert payloads(headrace, "shop/ann") == ['{"n": 1, "who": "ann"}', '{"n": 3, "who": "ann"}']
    assert payloads(headrace, "shop/bob") == ['{"n": 2, "who": "bob"}', '{"who":"bob"}']
    assert payloads(headrace, "shop/7") == ['{"who": 7, "n":4}']


def test_a_byte_order_mark_is_no_part_of_an_event(headrace: Headrace):
    assert headrace("publish", *BY_KEY, "--json", stdin=b"\xef\xbb\xbf" + order(1) + order(2)).json["events"] == 2
    assert payloads(headrace) == ['{"n": 1, "who": "ann"}', '{"n": 2, "who": "ann"}']


def test_raw_lines_are_published_as_they_are(headrace: Headrace):
    ran = headrace("publish", *TO_ONE, "--format", "raw", stdin=b"one\n\n  three \r\n\xff\nlast")

    assert ran.err.splitlines()[-1].startswith("headrace: published 5 events from 5 lines")
    assert [event["payload"] for event in stored(headrace)] == ["one", "", "  three ", "/w==", "last"]
    assert [event.get("encoding") for event in stored(headrace)] == [None, None, None, "base64", None]


def test_ids_and_times_come_from_fields(headrace: Headrace):
    lines = [
        order(1, id="a", at="2026-11-21T10:00:00+01:00"),
        order(2, id=17, at=1.5),
        order(3, id="c", at=-1),
    ]
    headrace("publish", *BY_KEY, "--id-field", "id", "--time-field", "at", stdin=b"".join(lines))

    assert [(event["id"], event["timestamp"]) for event in stored(headrace)] == [
        ("a", "2026-11-21T09:00:00+00:00"),
        ("17", "1970-01-01T00:00:01.500000+00:00"),
        ("c", "1969-12-31T23:59:59+00:00"),
    ]


@pytest.mark.long
def test_a_malformed_line_is_named_and_after_mending_nothing_is_doubled(tmp_path: Path, headrace: Headrace):
    good = [order(n) for n in range(1, 3001)]
    write(tmp_path / "orders.jsonl", *good[:1999], b'{"n": 2000, "who":\n', *good[2000:])

    refused = headrace("publish", *BY_KEY, "orders.jsonl").refused(1)
    assert refused == ("orders.jsonl:2000: not JSON: Input data was truncated; the lines before it are published")
    assert count(headrace) == 1999
    assert headrace("publish", *BY_KEY, "orders.jsonl").code == 1
    assert count(headrace) == 1999

    write(tmp_path / "orders.jsonl", *good)
    ran = headrace("publish", *BY_KEY, "orders.jsonl", "--json")
    assert "continuing after line 1,999: an earlier run published the lines up to it" in ran.err
    assert (ran.json["events"], ran.json["skipped_lines"]) == (1001, 1999)
    assert [json.loads(payload)["n"] for payload in payloads(headrace)] == list(range(1, 3001))


def test_the_same_file_by_another_path_goes_on_too(tmp_path: Path, headrace: Headrace):
    write(tmp_path / "a.jsonl", order(1), b"[\n")
    (tmp_path / "link").symlink_to("a.jsonl")
    headrace("publish", *BY_KEY, "a.jsonl")
    write(tmp_path / "a.jsonl", order(1), order(2))

    assert headrace("publish", *BY_KEY, tmp_path / "link", "--json").json["skipped_lines"] == 1


def test_a_file_that_was_changed_further_up_starts_anew(tmp_path: Path, headrace: Headrace):
    write(tmp_path / "a.jsonl", order(1), order(2), b"oops\n")
    headrace("publish", *BY_KEY, "a.jsonl")
    write(tmp_path / "a.jsonl", order(1), order(22), order(3))

    ran = headrace("publish", *BY_KEY, "a.jsonl", "--json")

    assert "lines up to 2 have changed since an earlier run published them: publishing all lines" in ran.err
    assert ran.json["events"] == 3
    assert count(headrace) == 5


async def test_a_publish_that_was_killed_before_its_first_line_says_nothing_of_it(tmp_path: Path, headrace: Headrace):
    write(tmp_path / "a.jsonl", order(1))
    async with Provider.open(tmp_path / "d") as provider:
        form = LineFormat(format="json", namespace="shop", key_field="who")
        journal = PublishJournal(ControlStoreJournals(provider), str(tmp_path / "a.jsonl"), form)
        journal.start_anew()
        await journal.intend(FilePosition(1, len(order(1)), "of the line"))
        assert await position(provider, str(tmp_path / "a.jsonl"), form) == (FileReader().position, 0)

    ran = headrace("publish", *BY_KEY, "a.jsonl")

    assert (ran.code, len(ran.err.splitlines())) == (0, 1)
    assert ran.err.startswith("headrace: published 1 event from 1 line")


def test_an_error_in_the_first_line_says_that_nothing_is_published(headrace: Headrace):
    refused = headrace("publish", *BY_KEY, stdin=b"oops\n").refused(1)
    assert refused.startswith("stdin:1: not JSON")
    assert refused.endswith("; nothing is published")


def test_a_file_that_is_cut_within_its_published_part_starts_anew(tmp_path: Path, headrace: Headrace):
    write(tmp_path / "a.jsonl", order(1), order(2), b"oops\n")
    headrace("publish", *BY_KEY, "a.jsonl")
    write(tmp_path / "a.jsonl", order(1))

    assert headrace("publish", *BY_KEY, "a.jsonl", "--json").json["events"] == 1


def test_another_form_is_another_publish(tmp_path: Path, headrace: Headrace):
    write(tmp_path / "a.jsonl", order(1), b"oops\n")
    headrace("publish", *BY_KEY, "a.jsonl")

    assert headrace("publish", *TO_ONE, "--format", "raw", "a.jsonl", "--json").json["events"] == 2


def test_a_file_that_is_published_whole_can_be_published_again(tmp_path: Path, headrace: Headrace):
    write(tmp_path / "a.jsonl", order(1), order(2))
    for _ in range(2):
        assert headrace("publish", *BY_KEY, "a.jsonl", "--json").json["events"] == 2
    assert count(headrace) == 4


def test_a_report_that_cannot_be_written_lets_the_next_run_publish_nothing(tmp_path: Path, headrace: Headrace):
    write(tmp_path / "a.jsonl", order(1), order(2))
    command = ["publish", *BY_KEY, "a.jsonl", "--json"]
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        process = forking().start(command, cwd=tmp_path, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE)
    finally:
        os.close(full)
    ran = ended(process)
    assert ran.code == 1
    assert ran.err.splitlines()[-2:] == [
        "headrace: all lines are published (2 events); only this report could not be written",
        "headrace: stdout: No space left on device",
    ]

    assert [headrace(*command).json["events"] for _ in range(2)] == [0, 2]
    assert count(headrace) == 4


def test_a_closed_stdin_is_one_line(tmp_path: Path):
    line = f"{shlex.quote(str(SCRIPT))} publish --data d --stream a/b <&-"
    ran = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (1, "headrace: stdin: Bad file descriptor")


def test_stdin_has_no_journal(headrace: Headrace):
    for _ in range(2):
        assert "stdin:2: not JSON" in headrace("publish", *BY_KEY, stdin=order(1) + b"oops\n").refused(1)
    assert count(headrace) == 2


def test_a_line_above_the_limit_is_named(tmp_path: Path, headrace: Headrace):
    write(tmp_path / "long", b"short\n", b"x" * (1 << 20) + b"\n", b"x" * ((1 << 20) + 1) + b"\n", b"after\n")

    refused = headrace("publish", *TO_ONE, "--format", "raw", "long").refused(1)

    assert refused.startswith("long:3: longer than 1,048,576 bytes, the limit of a payload")
    assert count(headrace) == 2


def test_a_line_without_end_is_not_read_to_its_end(headrace: Headrace):
    refused = headrace("publish", *TO_ONE, "--format", "raw", stdin=b"ok\n" + b"x" * (40 << 20)).refused(1)
    assert refused.startswith("stdin:2: longer than 1,048,576 bytes, the limit of a payload; ")
    assert count(headrace) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"oops", "not JSON"),
        (b'{"who":"ann"', "not JSON: Input data was truncated"),
        (b'{"who":"ann"} {}', "not JSON"),
        (b'{"who":"\xff"}', "not UTF-8 at byte 8 of the line: save the file as UTF-8, or use --format raw"),
        ('{"who":"ann"}'.encode("utf-16"), "not UTF-8 at byte 0 of the line"),
        (b"[" * 1500 + b"]" * 1500, "the JSON is nested too deeply: use --format raw"),
        (b"[1]", "not a JSON object, so it has no fields"),
        (b"{}", "has no field 'who'"),
        (b'{"who":null}', "field 'who' is neither text nor a whole number"),
        (b'{"who":1.5}', "field 'who' is neither text nor a whole number"),
        (b'{"who":true}', "field 'who' is neither text nor a whole number"),
        (b'{"who":"%s"}' % (b"k" * 1025), "a stream's key has 1,025 bytes"),
        (b'{"who":"a"}', "has no field 'id'"),
        (b'{"who":"a","id":[]}', "field 'id' is neither text nor a whole number"),
        (b'{"who":"a","id":1}', "has no field 'at'"),
        (b'{"who":"a","id":1,"at":"noon"}', "field 'at' is not a time"),
        (b'{"who":"a","id":1,"at":"2026-11-21T10:00:00"}', "field 'at' is not a time"),
        (b'{"who":"a","id":1,"at":1e300}', "field 'at' is not a time"),
        (b'{"who":"a","id":1,"at":null}', "field 'at' is not a time"),
        (b'{"who":"a","id":1,"at":"9999-12-31T23:59:59-23:59"}', "field 'at' is a time in the years 1 to 9999"),
        (b'{"who":"a","id":1,"at":"0001-01-01T00:00:00+23:59"}', "field 'at' is a time in the years 1 to 9999"),
        (b'{"who":"a","id":1,"at":-900000000000}', "field 'at' is a time in the years 1 to 9999"),
        (b'{"who":"a","id":"%s"}' % (b"i" * 5000), "the id of an event has at most"),
    ],
)
def test_why_a_line_is_no_event(line: bytes, reason: str):
    form = LineFormat(format="json", namespace="shop", key_field="who", id_field="id", time_field="at")
    with pytest.raises(ValueError, match=r"^" + reason.replace("(", r"\(")):
        form.event(line)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "name the stream"),
        ({"stream": "a/b", "namespace": "a"}, "name the stream"),
        ({"namespace": "a"}, "go together"),
        ({"key_field": "a"}, "go together"),
        ({"stream": "a"}, "names no stream"),
        ({"stream": "a/b", "format": "raw", "id_field": "x"}, "--format raw has no fields"),
    ],
)
def test_forms_that_do_not_fit_are_refused(options: dict[str, str], reason: str):
    with pytest.raises(InvalidArgument, match=reason):
        LineFormat(**({"format": "json"} | options))


@pytest.mark.long
def test_a_full_disk_is_one_line_and_the_next_run_goes_on(tmp_path: Path, headrace: Headrace):
    lines = [order(n, text="x" * 500) for n in range(8000)]
    write(tmp_path / "orders.jsonl", *lines)
    headrace("publish", *BY_KEY, "--option", "map_bytes=2097152", stdin=b"")

    full = headrace("publish", *BY_KEY, "orders.jsonl", "--option", "map_bytes=2097152").refused(1)
    assert "no space" in full or "full" in full
    there = count(headrace)
    assert 0 < there < 8000

    ran = headrace("publish", *BY_KEY, "orders.jsonl", "--json")
    assert ran.json["skipped_lines"] == there
    assert [json.loads(payload)["n"] for payload in payloads(headrace)] == list(range(8000))


def test_publishing_a_file_twice_at_once_is_refused(tmp_path: Path, headrace: Headrace):
    file = write(tmp_path / "a.jsonl", order(1))
    key = journal_key("default", os.path.realpath(file), LineFormat(format="json", namespace="shop", key_field="who"))

    with lock(open_data_directory(tmp_path / "d"), ".publish", key, "the file is being published"):
        refused = headrace("publish", *BY_KEY, "a.jsonl").refused(1)

    assert refused == f"'a.jsonl' is being published already by process {os.getpid()}: stop that one first"
    assert headrace("publish", *BY_KEY, "a.jsonl").code == 0


@pytest.mark.long
def test_interrupted_it_stops_between_two_calls_and_goes_on(tmp_path: Path, headrace: Headrace, start: Start):
    write(tmp_path / "a.jsonl", *(order(n, text="x" * 200) for n in range(80_000)))
    process = start("publish", *BY_KEY, "a.jsonl")
    published_lines(tmp_path, process, at_least=1)
    process.send_signal(signal.SIGINT)

    ran = ended(process)
    assert (ran.code, ran.err.splitlines()[-1]) == (130, "headrace: interrupted: run it again to continue")
    headrace("publish", *BY_KEY, "a.jsonl")
    assert count(headrace) == 80_000


def test_waiting_for_stdin_it_hears_signals(start: Start):
    process = start("publish", *BY_KEY)
    assert process.stdin is not None
    process.stdin.write(order(1))
    process.stdin.flush()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) in {130, -15}


def published_lines(directory: Path, process: Process, *, at_least: int) -> int:
    """Wait until the journal says so many lines, or the process has ended."""
    lines = 0
    while lines < at_least and process.poll() is None:
        lines = journal_lines(directory / "d" / "control.db")
        time.sleep(0.001)
    return lines


def journal_lines(database: Path) -> int:
    if not database.exists():
        return 0
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        try:
            rows = connection.execute("SELECT value FROM entries WHERE key LIKE 'publish/%'").fetchall()
        except sqlite3.OperationalError:  # not made yet, or busy
            return 0
    return json.loads(rows[0][0])["next"]["lines"] if rows else 0


def test_killed_at_random_moments_it_publishes_every_line_once(tmp_path: Path, headrace: Headrace, start: Start):
    total = 30_000
    keys = random.Random(7)
    write(tmp_path / "a.jsonl", *(order(n, f"k{keys.randrange(50)}", text="x" * 300) for n in range(total)))
    codes: list[int] = []
    for target in sorted(random.sample(range(1, total), 5)):
        process = start("publish", *BY_KEY, "a.jsonl")
        published_lines(tmp_path, process, at_least=target)
        process.kill()
        codes.append(process.wait())
        if codes[-1] == 0:  # it had published the last line: another call would publish the whole file again
            break
    assert codes[0] == -signal.SIGKILL
    assert codes[-1] == 0 or headrace("publish", *BY_KEY, "a.jsonl").code == 0
    by_stream: dict[str, list[int]] = {}
    for event in stored(headrace):
        by_stream.setdefault(event["stream"], []).append(json.loads(event["payload"])["n"])
    assert sorted(n for numbers in by_stream.values() for n in numbers) == list(range(total))
    assert all(numbers == sorted(numbers) for numbers in by_stream.values())


# Which of the journal's two positions holds is decided by the log.

FORM = LineFormat(format="raw", stream="shop/log")


async def test_a_call_that_was_only_noted_is_made_again(tmp_path: Path):
    async with Provider.open(tmp_path / "d") as provider:
        journal = await begun(provider)
        await journal.intend(FilePosition(2, 4, "later"))

        assert await position(provider) == (FilePosition(1, 2, "sooner"), 1)


async def test_a_call_that_was_stored_is_not_made_again(tmp_path: Path):
    async with Provider.open(tmp_path / "d") as provider:
        journal = await begun(provider)
        sequence = await journal.intend(FilePosition(2, 4, "later"))
        await provider.publish_many([(StreamId("shop", "log"), b"2")], sequence=sequence)

        assert await position(provider) == (FilePosition(2, 4, "later"), 2)


async def test_a_producer_that_the_log_forgot_is_reported(tmp_path: Path):
    async with Provider.open(tmp_path / "d") as provider:
        journal = PublishJournal(ControlStoreJournals(provider), "f", FORM)
        journal.start_anew()
        journal.published(FilePosition(5, 10, "sooner"))
        await journal.intend(FilePosition(6, 12, "later"))

        found = await PublishJournal(ControlStoreJournals(provider), "f", FORM).stored()
        assert found is not None
        assert found.is_forgotten


async def position(provider: Provider, file: str = "f", form: LineFormat = FORM) -> tuple[FilePosition, int]:
    """The position and the last line that another run finds."""
    found = await PublishJournal(ControlStoreJournals(provider), file, form).stored()
    assert found is not None
    assert not found.is_forgotten
    return found.position, found.last


async def begun(provider: Provider) -> PublishJournal:
    """A journal after one line was published."""
    journal = PublishJournal(ControlStoreJournals(provider), "f", FORM)
    assert await journal.stored() is None
    journal.start_anew()
    sequence = await journal.intend(FilePosition(1, 2, "sooner"))
    assert sequence[1:] == (1, 0)
    await provider.publish_many([(StreamId("shop", "log"), b"1")], sequence=sequence)
    journal.published(FilePosition(1, 2, "sooner"))
    return journal


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        (b"1\n2\n", b"1\n2\n3\n", True),
        (b"1\n2\n", b"1\n2\n", True),
        (b"1\n2", b"1\n2", True),
        (b"1\n2", b"1\n23\n", False),
        (b"1\n2\n", b"1\n3\n", False),
        (b"1\n2\n", b"1\n", False),
        (b"", b"1\n", True),
    ],
)
def test_a_position_holds_while_everything_before_it_is_the_same(tmp_path: Path, then: bytes, now: bytes, same: bool):
    reader = FileReader()
    reader.add(then, then.count(b"\n"))
    with write(tmp_path / "f", now).open("rb") as file:
        assert FileReader().move_to(file.fileno(), reader.position) is same
        assert not same or file.read() == now[len(then) :]
