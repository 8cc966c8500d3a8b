"""`headrace streams`, `queues`, `subscriptions` and `deadletters`: they show the stored data, and change it."""

import asyncio
import base64
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace import Event, Mode, OnFailure, Provider, RetryPolicy, Selector, Start, StreamId, SubscriptionDefinition
from headrace.cli.commands.deadletters import one_line
from headrace.cli.commands.output import print_fields, print_table
from tests.cli.commandline import Headrace, ended, on_terminal
from tests.cli.commandline import Start as StartProcess

DATA = ["--data", "d"]


@pytest_asyncio.fixture
async def provider(tmp_path: Path) -> AsyncIterator[Provider]:
    async with Provider.open(tmp_path / "d", queues=2) as provider:
        yield provider


async def fail(_: Event) -> None:
    raise ValueError("no\nstock")


async def give_up_on(provider: Provider, *payloads: bytes, on_failure: OnFailure = OnFailure.DEAD_LETTER) -> None:
    """Publish, and let subscription `orders` fail."""
    for payload in payloads:
        await provider.publish_many([(stream_of(payload), Event(payload, headers={"h": "1"}, id="e"))])
    once = RetryPolicy(max_attempts=1)
    subscription = await provider.subscribe(
        "orders", "shop/*", fail, start=Start.earliest(), retry=once, on_failure=on_failure
    )
    await subscription.caught_up()
    await subscription.close()


def stream_of(payload: bytes) -> StreamId:
    return StreamId("shop", payload.decode("latin-1"))


async def test_streams_are_listed_by_name_with_their_stored_events(provider: Provider, headrace: Headrace):
    await provider.stream("shop", "b").publish([b"1", b"22"])
    await provider.stream("shop", "b").publish(b"333")
    await provider.stream("shop", "a/é").publish(b"1")
    await provider.stream("yard", "").publish(b"1")

    found = headrace("streams", *DATA, "--json").json

    assert [one["stream"] for one in found] == ["shop/a/é", "shop/b", "yard/"]
    b = found[1]
    assert (b["namespace"], b["key"], b["events"], b["last"].partition(".")[0] > b["first"]) == ("shop", "b", 3, True)
    assert b["queue"] == provider.queue_of(StreamId("shop", "b"))
    assert [one["stream"] for one in headrace("streams", *DATA, "--namespace", "yard", "--json").json] == ["yard/"]
    assert "shop/a/é" in headrace("streams", *DATA).out


async def test_an_empty_provider_has_no_streams(provider: Provider, headrace: Headrace):
    assert headrace("streams", *DATA, "--json").json == []


async def test_queues_show_their_sizes_and_the_lagging_subscriptions(provider: Provider, headrace: Headrace):
    stream = StreamId("shop", "a")
    queue = provider.queue_of(stream)
    headrace("subscriptions", "create", *DATA, "behind", "shop/*")
    for _ in range(3):
        await provider.publish(stream, [b"x", b"y"])
    headrace("subscriptions", "create", *DATA, "fresh", "shop/*")

    queues = headrace("queues", *DATA, "--json").json

    assert [one["queue"] for one in queues] == [0, 1]
    one = queues[queue]
    assert (one["first"], one["next"], one["events"]) == (0, 3, 6)
    assert one["bytes"] > 0
    assert one["subscriptions"]["behind"] == {
        "next_offset": 0, "watermark": 0, "streams_behind": 0, "streams_paused": 0, "lag": 3,
    }  # fmt: skip
    assert one["subscriptions"]["fresh"]["lag"] == 0
    assert (queues[1 - queue]["events"], queues[1 - queue]["subscriptions"]["behind"]["lag"]) == (0, 0)


@pytest.mark.long
@pytest.mark.usefixtures("provider")
def test_a_subscription_is_created_shown_moved_and_deleted(headrace: Headrace):
    create = ["subscriptions", "create", *DATA, "orders", "shop/*", "--max-attempts", "3", "--on-failure", "skip"]
    assert headrace(*create, "--json").json == {"name": "orders", "created": True}
    assert headrace(*create, "--json").json == {"name": "orders", "created": False}
    assert "exists with another definition" in headrace(*create[:-2]).refused(1)
    headrace("publish", *DATA, "--stream", "shop/a", stdin=b"1\n2\n")

    shown = headrace("subscriptions", "show", *DATA, "orders", "--json").json
    assert (shown["selector"], shown["retry"]["max_attempts"], shown["on_failure"]) == ("shop/*", 3, "skip")
    assert (shown["lag"], len(shown["queues"])) == (1, 2)
    assert headrace("subscriptions", "seek", *DATA, "orders", "latest", "--json").json == {
        "name": "orders", "moved": True, "not_moved": 0,
    }  # fmt: skip
    (listed,) = headrace("subscriptions", "list", *DATA, "--json").json
    assert (listed["name"], listed["lag"], listed["dead_letters"], listed["gaps"]) == ("orders", 0, 0, 0)
    headrace("subscriptions", "seek", *DATA, "orders", "earliest")
    assert headrace("subscriptions", "show", *DATA, "orders", "--json").json["lag"] == 1

    assert headrace("subscriptions", "delete", *DATA, "orders", "--json").json == {"name": "orders", "deleted": True}
    assert headrace("subscriptions", "list", *DATA, "--json").json == []
    for action in (["show"], ["delete"], ["seek"]):
        rest = ["latest"] if action == ["seek"] else []
        assert "has no subscription 'orders'" in headrace("subscriptions", *action, *DATA, "orders", *rest).refused(1)


@pytest.mark.long
def test_a_served_subscription_is_moved_and_deleted(headrace: Headrace, start: StartProcess):
    headrace("publish", *DATA, "--stream", "shop/a", stdin=b"1\n")
    process = start("subscribe", *DATA, "shop/*", "--name", "orders", "--from", "earliest")
    assert process.stdout is not None
    first = process.stdout.readline()
    headrace("subscriptions", "seek", *DATA, "orders", "earliest")
    assert process.stdout.readline() == first  # its process has noticed the move
    headrace("subscriptions", "delete", *DATA, "orders")
    assert ended(process).code == 1


async def test_a_broadcast_subscription_is_listed_once_and_shown_with_its_slowest_consumer(
    provider: Provider, headrace: Headrace
):
    for payload in (b"a", b"b"):
        await provider.stream("shop", "x").publish(payload)
    async with (
        provider.subscribe("all", "shop/*", consumer="quick", mode=Mode.BROADCAST, start="earliest") as quick,
        provider.subscribe("all", "shop/*", consumer="slow", mode=Mode.BROADCAST, start="earliest"),
    ):
        for _ in range(2):
            await (await anext(quick)).ack()
        await quick.saved()
        assert [one["name"] for one in headrace("subscriptions", "list", *DATA, "--json").json] == ["all"]
        queue = str(provider.queue_of(StreamId("shop", "x")))
        shown = headrace("subscriptions", "show", *DATA, "all", "--json").json["queues"][queue]
        assert (shown["lag"], shown["watermark"]) == (2, 0)


async def test_a_paused_stream_is_shown_and_resumed(provider: Provider, headrace: Headrace):
    await give_up_on(provider, b"a", b"b", on_failure=OnFailure.PAUSE)
    show = headrace("subscriptions", "show", *DATA, "orders", "--json").json
    queue = str(provider.queue_of(stream_of(b"a")))
    assert show["queues"][queue]["paused"]["shop/a"] == "ValueError: no\nstock"

    assert headrace("subscriptions", "resume", *DATA, "orders", "shop/a", "--json").json["resumed"] is True
    assert "stream 'shop/a' is not paused" in headrace("subscriptions", "resume", *DATA, "orders", "shop/a").refused(1)
    assert "stream 'shop/none' is not paused" in headrace(
        "subscriptions", "resume", *DATA, "orders", "shop/none"
    ).refused(1)

    delivered: list[bytes] = []

    async def take(event: Event) -> None:
        delivered.append(event.payload)

    subscription = await provider.subscribe(
        "orders", "shop/*", take, start=Start.earliest(), retry=RetryPolicy(max_attempts=1), on_failure=OnFailure.PAUSE
    )
    await subscription.caught_up()
    assert delivered == [b"a"]


@pytest.mark.long
async def test_dead_letters_are_listed_shown_redriven_and_deleted(provider: Provider, headrace: Headrace):
    await give_up_on(provider, b"a", b"b", b"\xff")
    listed = headrace("deadletters", "list", *DATA, "--json").json
    assert sorted(one["stream"] for one in listed) == ["shop/a", "shop/b", "shop/ÿ"]
    by_stream = {one["stream"]: one for one in listed}
    a = by_stream["shop/a"]
    assert (a["subscription"], a["attempts"], a["event_id"], a["redrive"]) == ("orders", 1, "e", False)
    assert a["reason"] == "ValueError: no\nstock"
    unknown = headrace("deadletters", "list", *DATA, "--subscription", "other", "--json").refused(1)
    assert "has no subscription 'other'" in unknown
    first = headrace("deadletters", "list", *DATA, "--limit", 1)
    assert f"continue with --after {listed[0]['id']}" in first.err
    assert headrace("deadletters", "list", *DATA, "--after", listed[0]["id"], "--json").json == listed[1:]

    shown = headrace("deadletters", "show", *DATA, a["id"], "--json").json
    assert (shown["payload"], shown["headers"]) == ("a", {"h": "1"})
    binary = headrace("deadletters", "show", *DATA, by_stream["shop/ÿ"]["id"], "--json").json
    assert (base64.b64decode(binary["payload"]), binary["encoding"]) == (b"\xff", "base64")
    assert "there is no dead letter 99" in headrace("deadletters", "show", *DATA, 99).refused(1)

    of_orders = [*DATA, "--subscription", "orders", "--json"]
    assert headrace("deadletters", "redrive", *of_orders, a["id"]).json == {"subscription": "orders", "asked_for": 1}
    assert headrace("deadletters", "show", *DATA, a["id"], "--json").json["redrive"] is True
    assert headrace("deadletters", "delete", *of_orders, a["id"]).json == {"subscription": "orders", "deleted": 1}
    assert headrace("deadletters", "delete", *of_orders, "--all").json["deleted"] == 2
    assert headrace("deadletters", "list", *DATA, "--json").json == []


@pytest.mark.long
@pytest.mark.parametrize("action", ["redrive", "delete"])
async def test_dead_letters_that_do_not_exist_are_named_and_nothing_is_done(
    action: str, provider: Provider, headrace: Headrace
):
    await give_up_on(provider, b"a")
    (letter,) = headrace("deadletters", "list", *DATA, "--json").json
    of_orders = ["deadletters", action, *DATA, "--subscription", "orders"]

    refused = headrace(*of_orders, letter["id"], 98, 99).refused(1)
    assert refused == "subscription 'orders' has no dead letters 98, 99: nothing was changed"
    refused = headrace(*of_orders, 1 << 70).refused(1)
    assert refused == f"subscription 'orders' has no dead letter {1 << 70}: nothing was changed"
    refused = headrace("deadletters", action, *DATA, "--subscription", "other", 1).refused(1)
    assert refused == "provider 'default' has no subscription 'other'"
    assert "no subscription 'other'" in headrace(
        "deadletters", action, *DATA, "--subscription", "other", "--all"
    ).refused(1)
    assert headrace("deadletters", "list", *DATA, "--json").json == [letter]
    assert "1 dead letter of subscription 'orders'" in headrace(*of_orders, letter["id"]).err


async def test_dead_letters_of_streams_that_the_subscription_does_not_select_are_not_redriven(
    provider: Provider, headrace: Headrace
):
    await give_up_on(provider, b"a", b"b")
    await provider.delete_subscription("orders")
    await provider.create_subscription(SubscriptionDefinition(name="orders", selector=Selector("shop/b")))
    a, b = sorted(headrace("deadletters", "list", *DATA, "--json").json, key=lambda one: one["stream"])
    of_orders = ["deadletters", "redrive", *DATA, "--subscription", "orders"]

    refused = headrace(*of_orders, b["id"], a["id"]).refused(1)
    assert refused == (
        f"subscription 'orders' does not select the stream of dead letter {a['id']}: a deleted subscription had the "
        "same name; nothing was changed"
    )
    assert headrace("deadletters", "show", *DATA, b["id"], "--json").json["redrive"] is False
    assert "1 dead letter of subscription 'orders'" in headrace(*of_orders, b["id"]).err


async def test_dead_letters_of_a_deleted_subscription_are_listed_until_they_are_gone(
    provider: Provider, headrace: Headrace
):
    await give_up_on(provider, b"a")
    await provider.delete_subscription("orders")
    of_orders = [*DATA, "--subscription", "orders"]

    assert len(headrace("deadletters", "list", *of_orders, "--json").json) == 1
    assert headrace("deadletters", "delete", *of_orders, "--all", "--json").json["deleted"] == 1
    assert "no subscription 'orders'" in headrace("deadletters", "list", *of_orders).refused(1)


async def test_a_piped_table_has_one_line_for_each_row(provider: Provider, headrace: Headrace):
    stream = b"a" * 300
    await give_up_on(provider, stream)

    letters = [line for line in headrace("deadletters", "list", *DATA).out.splitlines() if "orders" in line]
    assert len(letters) == 1
    assert f"shop/{stream.decode()}" in letters[0]
    assert letters[0].rstrip().endswith("ValueError: no …")
    assert re.search(r" \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 ", letters[0])


@pytest.mark.long
async def test_no_number_or_heading_is_broken_on_a_terminal(provider: Provider, tmp_path: Path, headrace: Headrace):
    await give_up_on(provider, b"a")
    headrace("subscriptions", "create", *DATA, "a-name-that-is-rather-long-for-a-table", "shop/*")
    events = [b"x" * 100] * 1000
    for key in range(40):
        await provider.stream("shop", str(key)).publish(events)

    def shown(*arguments: object) -> list[str]:
        return on_terminal(tmp_path, *arguments, *DATA).splitlines()

    of = {queue["queue"]: queue for queue in headrace("queues", *DATA, "--json").json}
    for columns in (40, 80):
        queues = on_terminal(tmp_path, "queues", *DATA, columns=columns)
        for word in (f"{of[0]['events']:,}", f"{of[1]['bytes']:,}", "batches", "seconds"):
            assert re.search(rf"(^|[ ~]){word}( |$)", queues, re.MULTILINE), queues
    assert "a-name-that-is-rather-long-for-a-table  shop/*" in "\n".join(shown("subscriptions", "list"))
    letters = shown("deadletters", "list")
    assert letters[0].split() == ["id", "1"]
    assert [line.split()[0] for line in letters] == [
        "id", "subscription", "stream", "token", "attempts", "failed_at", "reason",
    ]  # fmt: skip
    assert re.search(r" \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$", letters[5])


@pytest.mark.long
async def test_the_columns_of_piped_tables_do_not_depend_on_the_rows(provider: Provider, headrace: Headrace):
    commands = [("queues",), ("subscriptions", "list"), ("deadletters", "list"), ("streams",)]

    def headings() -> list[list[str]]:
        return [headrace(*command, *DATA).out.splitlines()[0].split() for command in commands]

    empty = headings()
    await give_up_on(provider, b"a")
    await provider.create_subscription(SubscriptionDefinition(name="other", selector=Selector("shop/*")))
    assert headings() == empty
    assert empty[0][5:] == ["lag", "batches", "lag", "events", "lag", "seconds", "delayed", "due", "in", "s"]


async def test_a_value_that_is_absent_is_a_dash(provider: Provider, headrace: Headrace):
    await give_up_on(provider, b"a")
    (letter,) = headrace("deadletters", "list", *DATA, "--json").json
    subscription = headrace("subscriptions", "show", *DATA, "orders").out
    shown = headrace("deadletters", "show", *DATA, letter["id"]).out
    for name, value in (("filter", "–"), ("start", "earliest"), ("retry.max_attempts", "1")):
        assert re.search(rf"^{name} +{value}$", subscription, re.MULTILINE), subscription
    assert re.search(r"^reason        ValueError: no\n {14}stock$", shown, re.MULTILINE), shown
    assert re.search(r"^headers\.h     1$", shown, re.MULTILINE), shown
    assert not re.search(r"None|null|[{}]", subscription + shown + headrace("queues", *DATA).out)


@pytest.mark.parametrize(
    ("text", "line"),
    [("a", "a"), (" a \n", "a"), ("a\nb", "a …"), ("", ""), ("x" * 100, "x" * 100), ("x" * 101, "x" * 100 + " …")],
)
def test_a_reason_is_cut_to_one_line(text: str, line: str):
    assert one_line(text) == line


async def test_paused_streams_are_counted(provider: Provider, headrace: Headrace):
    await give_up_on(provider, b"a", b"b", on_failure=OnFailure.PAUSE)
    (listed,) = headrace("subscriptions", "list", *DATA, "--json").json
    assert listed["paused"] == 2
    assert "paused" in headrace("subscriptions", "list", *DATA).out


async def test_which_dead_letters_has_to_be_said(provider: Provider, headrace: Headrace):
    for action in ("redrive", "delete"):
        for which in ([], ["--all", "1"]):
            refused = headrace("deadletters", action, *DATA, "--subscription", "orders", *which).refused(2)
            assert refused == "name the dead letters: give their ids, or --all"


async def test_a_redrive_is_delivered_by_the_process_that_serves_the_subscription(
    provider: Provider, headrace: Headrace
):
    await give_up_on(provider, b"a", b"b")
    redriven: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(event: Event) -> None:
        await redriven.put(event.payload)

    once = RetryPolicy(max_attempts=1)
    await provider.subscribe("orders", "shop/*", take, start=Start.earliest(), retry=once)
    ran = await asyncio.to_thread(headrace, "deadletters", "redrive", *DATA, "--subscription", "orders", "--all")

    assert "to be delivered once more: 2 dead letters of subscription 'orders'" in ran.err
    assert {await redriven.get(), await redriven.get()} == {b"a", b"b"}


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("stream", "reason"), [("orders/\x1b[2J", "two\nlines\x9b\u202e")])
    print_fields({"reason": "\x1b]0;title\x07"})
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(capsys.readouterr().out)
