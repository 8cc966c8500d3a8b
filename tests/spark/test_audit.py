"""`headrace pipeline audit` finds the missing and double events, those given up on or not yet done, and no others."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace import (
    DeadLetter,
    Event,
    GapRecord,
    InvalidArgument,
    NotFound,
    Provider,
    RetryPolicy,
    Selector,
    SequenceToken,
    Start,
    StreamId,
    SubscriptionDefinition,
)
from headrace.pipeline.jobs.archive import archive
from headrace.pipeline.jobs.audit import audit
from headrace.pipeline.jobs.findings import CLASSES, UNKNOWN, AuditResult, SubscriptionAudit
from headrace.streams.subscriptions import Checkpoint, StreamBehind
from tests.cli.commandline import SCRIPT
from tests.cli.flights_file import write_flights
from tests.spark.test_source import publish

NAME = "books"
EVENTS, LATER = 60, 5
BAD = 17
CLEAN = dict.fromkeys((*CLASSES, UNKNOWN), 0)
Token = tuple[int, int, int]


class Scene(NamedTuple):
    """A provider whose subscription was given some events, gave up on one, and has others to come."""

    data: Path
    delivered: Sequence[Token]
    """By queue, offset and index, in order of delivery."""
    streams: dict[Token, str]
    dead: Token


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    data = tmp_path_factory.mktemp("audited") / "data"
    given: list[Token] = []
    streams: dict[Token, str] = {}
    dead: list[Token] = []

    async def handle(event: Event) -> None:
        assert event.stream is not None
        assert event.token is not None
        token = (queue_of(event.stream), event.token.offset, event.token.index)
        streams[token] = str(event.stream)
        if event.payload == b"%d" % BAD:
            dead.append(token)
            raise ValueError("no such book")
        given.append(token)

    def queue_of(stream: StreamId) -> int:
        return provider.queue_of(stream)

    async def run() -> None:
        nonlocal provider
        async with Provider.open(data, queues=2) as provider:
            for number in range(EVENTS // 2):  # batches of two
                events = [b"%d" % (2 * number), b"%d" % (2 * number + 1)]
                await provider.stream("b", str(number % 4)).publish(events)
            policy = RetryPolicy(max_attempts=1)
            subscription = await provider.subscribe(NAME, "b/*", handle, start=Start.earliest(), retry=policy)
            await subscription.caught_up()
            await subscription.close()
            for number in range(LATER):
                await provider.stream("b", str(number % 4)).publish([b"later"])

    provider: Provider
    asyncio.run(run())
    return Scene(data, given, streams, dead[0])


def lines(path: Path, tokens: Sequence[Token], **more: str) -> Path:
    rows = [dict(zip(("queue", "offset", "index"), token, strict=True)) | more for token in tokens]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def only(found: AuditResult) -> SubscriptionAudit:
    (one,) = found.subscriptions
    return one


def counts(**other: int) -> dict[str, int]:
    named = {"dead": "dead-lettered", "contradicted": "delivered and dead-lettered"}
    return CLEAN | {named.get(name, name): number for name, number in other.items()}


def stored(data: Path, act: Callable[[Provider], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with Provider.open(data) as provider:
            return await act(provider)

    return asyncio.run(run())


def test_checkpoints_and_dead_letters_account_for_every_event(spark: SparkSession, scene: Scene):
    found = audit(spark, data=scene.data)
    assert found.ok
    assert (found.events, found.published_twice, found.holes) == (EVENTS + LATER, 0, 0)
    one = only(found)
    assert (one.name, one.published, one.exact) == (NAME, EVENTS + LATER, True)
    assert one.counts == counts(delivered=EVENTS - 1, dead=1, pending=LATER)
    (letter,) = one.findings
    queue, offset, index = scene.dead
    assert (letter.kind, letter.queue, letter.first, letter.events) == ("dead-lettered", queue, (offset, index), 1)
    assert "no such book" in letter.reason


def test_a_dead_letter_of_another_event_at_the_same_position_does_not_count(spark: SparkSession, tmp_path: Path):
    publish(tmp_path, [(f"n/{n}", Event(b"%d" % n, timestamp_us=n)) for n in range(4)], queues=1)
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"), start=Start.earliest())

    def letter(n: int, payload: bytes, timestamp_us: int) -> DeadLetter:
        of = StreamId("n", str(n)), SequenceToken(n), payload, dict[str, str](), None, timestamp_us
        return DeadLetter(0, "default", "s", 0, *of, f"letter {n}", 1, 1)

    async def plant(provider: Provider) -> None:
        await provider.create_subscription(definition)
        await provider.store.seek(provider.name, "s", {0: Checkpoint(4)}, "planted")
        letters = [letter(1, b"1", 1), letter(1, b"1", 7), letter(2, b"lost", 2), letter(3, b"3", 7)]
        await provider.store.add_dead_letters(letters, None)

    stored(tmp_path, plant)
    found = only(audit(spark, data=tmp_path))
    assert found.counts == counts(delivered=3, dead=1)
    assert [(finding.first, finding.reason) for finding in found.findings] == [((1, 0), "letter 1")]


@pytest.mark.slow
def test_events_that_consumers_wrote_are_compared_one_by_one(spark: SparkSession, scene: Scene, tmp_path: Path):
    found = audit(spark, [NAME], delivered=lines(tmp_path / "all.jsonl", scene.delivered), data=scene.data)
    assert only(found).counts == counts(delivered=EVENTS - 1, dead=1, pending=LATER)
    assert found.ok


def test_a_planted_gap_and_planted_duplicates_are_found(spark: SparkSession, scene: Scene, tmp_path: Path):
    lost, twice, *_ = scene.delivered
    wrong = [*scene.delivered[1:], twice, scene.dead, (0, 0, 99), (7, 0, 0), (1, 10_000, 0)]
    one = only(audit(spark, delivered=lines(tmp_path / "wrong.jsonl", wrong, subscription=NAME), data=scene.data))
    assert not one.ok
    assert one.counts == counts(delivered=EVENTS - 3, pending=LATER, missing=1, duplicate=1, contradicted=1, unknown=3)
    told = [(finding.kind, (finding.queue, *finding.first), finding.events) for finding in one.findings]
    assert told == [
        ("missing", lost, 1),
        ("duplicate", twice, 1),
        ("delivered and dead-lettered", scene.dead, 1),
        ("unknown", (0, 0, 99), 1),
        ("unknown", (1, 10_000, 0), 1),
        ("unknown", (7, 0, 0), 1),
    ]
    assert str(StreamId(one.findings[0].namespace or "", one.findings[0].key or "")) == scene.streams[lost]


# slow: a second query for one number
@pytest.mark.slow
def test_all_findings_are_counted_when_few_are_listed(spark: SparkSession, scene: Scene, tmp_path: Path):
    twice = lines(tmp_path / "twice.jsonl", [*scene.delivered, *scene.delivered[:2]], subscription=NAME)
    one = only(audit(spark, delivered=twice, limit=1, data=scene.data))
    assert one.counts == counts(delivered=EVENTS - 3, dead=1, pending=LATER, duplicate=2)
    assert len(one.findings) == 1


def test_events_that_a_subscription_skipped_have_a_gap_record(spark: SparkSession, tmp_path: Path):
    publish(tmp_path, [(f"n/{n % 2}", b"x") for n in range(20)], queues=1)
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"), start=Start.earliest())
    zero, one = StreamId("n", "0"), StreamId("n", "1")

    async def plant(provider: Provider) -> None:
        await provider.create_subscription(definition)
        # Stream 0 is behind at offset 4, with 8 done out of order; all else is done below 15.
        behind = {zero: StreamBehind(SequenceToken(4), "", ((8, 0, 1),))}
        await provider.store.seek(provider.name, "s", {0: Checkpoint(15, behind)}, "planted")
        gaps = [
            GapRecord(provider.name, "s", 0, None, SequenceToken(0), SequenceToken(2), "range", 1),
            GapRecord(provider.name, "s", 0, one, SequenceToken(3), SequenceToken(3, 1), "single", 1),
            GapRecord(provider.name, "s", 0, one, SequenceToken(4), SequenceToken(8), "of one stream", 1),
        ]
        await provider.store.add_gaps(gaps)

    stored(tmp_path, plant)
    found = only(audit(spark, data=tmp_path))
    assert found.ok
    # Of 0: 0 skipped, 2 and 8 done. Of 1: 1 skipped, 3, 5 and 7 skipped, 9, 11 and 13 done.
    assert found.counts == counts(delivered=5, skipped=5, pending=10)
    reasons = {(finding.key, finding.reason, finding.events) for finding in found.findings}
    assert reasons == {("0", "range", 1), ("1", "range", 1), ("1", "single", 1), ("1", "of one stream", 2)}


def test_events_removed_undone_are_missing_unless_a_record_has_them(spark: SparkSession, tmp_path: Path):
    first = publish_and_retain(tmp_path)
    one = only(audit(spark, data=tmp_path))
    assert (one.ok, one.lost_offsets, one.counts["pending"]) == (False, first, 60 - first)
    assert (one.findings[0].kind, one.findings[0].first, one.findings[0].last) == ("missing", (0, 0), (first - 1, 0))
    gap = GapRecord("default", "s", 0, None, SequenceToken(0), SequenceToken(first), "removed", 1)
    stored(tmp_path, lambda provider: provider.store.add_gaps([gap]))
    assert only(audit(spark, data=tmp_path)).ok


# slow: archives are compared as logs are, and have tests of their own
@pytest.mark.slow
def test_events_removed_undone_that_an_archive_has_are_not_missing(spark: SparkSession, tmp_path: Path):
    data, kept = tmp_path / "data", tmp_path / "archive"
    publish_and_retain(data, lambda: archive(spark, kept, data=data))
    one = only(audit(spark, archive=kept, data=data))
    assert (one.ok, one.lost_offsets, one.counts["pending"]) == (True, 0, 60)


def publish_and_retain(data: Path, between: Callable[[], object] = lambda: None) -> int:
    """Publish 60 events to queue 0, which subscription s has not done. Return the first that retention left."""
    publish(data, [("n/0", Event(b"x" * 100_000)) for _ in range(60)], queues=1, group_bytes=100_000)
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"), start=Start.earliest())
    stored(data, lambda provider: provider.create_subscription(definition))
    between()
    first = retained(data)
    assert 0 < first < 60
    return first


RETAIN = """
import asyncio, sys
from headrace import Provider

async def retain():
    async with Provider.open(sys.argv[1], options={"retain_bytes": 1 << 20, "retain_unfinished": False}) as provider:
        await provider.adapter.apply_retention({})
        print((await provider.adapter.bounds(0)).first)

asyncio.run(retain())
"""


def retained(data: Path) -> int:
    """Have retention remove most. In a process of its own: in this one the log is open without it."""
    return int(subprocess.check_output([sys.executable, "-c", RETAIN, str(data)], timeout=60))


def test_an_id_that_is_twice_in_a_stream_is_found(spark: SparkSession, tmp_path: Path):
    ids = [("n/0", "a"), ("n/0", "b"), ("n/0", "a"), ("n/1", "a"), ("n/0", "a")]
    publish(tmp_path, [(stream, Event(b"x", id=identity)) for stream, identity in ids], queues=1)
    found = audit(spark, data=tmp_path)
    assert (found.ok, found.published_twice, found.subscriptions) == (False, 2, [])
    (finding,) = found.findings
    assert (finding.key, finding.first, finding.last, finding.events) == ("0", (0, 0), (4, 0), 3)


def test_impossible_comparison_is_refused(spark: SparkSession, scene: Scene, tmp_path: Path):
    with pytest.raises(NotFound, match="no subscription 'books2'"):
        audit(spark, ["books2"], data=scene.data)
    with pytest.raises(InvalidArgument, match="option 'namespace' is not for an audit"):
        audit(spark, data=scene.data, namespace="b")
    pq.write_table(pa.table({"queue": [1], "offset": [1]}), tmp_path / "short.parquet")
    with pytest.raises(InvalidArgument, match="column 'index' is missing"):
        audit(spark, delivered=tmp_path / "short.parquet", data=scene.data)
    (tmp_path / "null.jsonl").write_text('{"queue": 1, "offset": 2}\n')
    with pytest.raises(InvalidArgument, match="1 row without queue, offset or index"):
        audit(spark, delivered=tmp_path / "null.jsonl", data=scene.data)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_is_clean_and_a_damaged_ledger_is_found(spark: SparkSession, tmp_path: Path):
    flights, data = write_flights(tmp_path / "flights.csv", 3_000), tmp_path / "d"
    subprocess.run([SCRIPT, "demo", "--flights", str(flights), "--data", str(data), "--json"], check=True, timeout=200)
    token_of = tokens_by_row(spark, data)
    ledgers = {name: rows_of(data, name) for name in ("delays", "order", "slow")}
    found = audit(spark, delivered=as_parquet(tmp_path / "right", ledgers, token_of), data=data)
    assert found.ok
    assert {one.name: one.counts for one in found.subscriptions} == dict.fromkeys(ledgers, counts(delivered=3_000))
    damaged = {**ledgers, "order": [*ledgers["order"][:1000], *ledgers["order"][1001:], ledgers["order"][5]]}
    path = as_parquet(tmp_path / "wrong", damaged, token_of)
    command = [SCRIPT, "pipeline", "audit", "--data", str(data), "--delivered", str(path), "--json", "order", "slow"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ})
    assert ran.returncode == 1, ran
    order, slow = json.loads(ran.stdout)["subscriptions"]
    assert (order["missing"], order["duplicate"], slow["ok"]) == (1, 1, True)
    tokens = [(finding["queue"], finding["first"]) for finding in order["findings"]]
    expected = [token_of[ledgers["order"][n]] for n in (1000, 5)]
    assert tokens == [(queue, str(SequenceToken(offset, index))) for queue, offset, index in expected]
    assert ran.stderr.splitlines() == [
        "headrace: subscription 'order': 1 event missing",
        "headrace: subscription 'order': 1 event duplicate",
    ]


def tokens_by_row(spark: SparkSession, data: Path) -> dict[int, Token]:
    options = {"data": str(data), "decode": "json", "payloadSchema": "row INT"}
    events = spark.read.format("headrace").options(**options).load().select("value.row", "queue", "offset", "index")
    return {row.row: (row.queue, row.offset, row["index"]) for row in events.collect()}


def rows_of(data: Path, job: str) -> list[int]:
    record = Struct("<Ih2s") if job == "delays" else Struct("<I")
    return [entry[0] for entry in record.iter_unpack((data / "demo" / f"{job}.ledger").read_bytes())]


def as_parquet(folder: Path, ledgers: dict[str, list[int]], token_of: dict[int, Token]) -> Path:
    folder.mkdir()
    for name, rows in ledgers.items():
        queues, offsets, indices = zip(*(token_of[row] for row in rows), strict=True)
        columns = {"subscription": [name] * len(rows), "queue": queues, "offset": offsets, "index": indices}
        pq.write_table(
            pa.table({key: pa.array(list(column)) for key, column in columns.items()}), folder / f"{name}.parquet"
        )
    return folder
