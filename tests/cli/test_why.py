"""`headrace why`."""

import json
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from headrace import Provider, StreamId
from headrace.cli.main import main
from headrace.silo.why_gathering import explain_stream
from headrace.streams.identity import SequenceToken
from headrace.streams.subscriptions import GapRecord, Mode, Selector, SubscriptionDefinition
from tests.cli.commandline import Headrace
from tests.cli.test_cli_cluster import evenly
from tests.silo.talking import silos


async def _stored(data: Path) -> None:
    async with Provider.open(data, queues=1) as provider:
        await provider.create_subscription(SubscriptionDefinition(name="bills", selector=Selector("shop/*")))
        await provider.publish(StreamId("shop", "1"), b"x")


@pytest.fixture
async def data(tmp_path: Path) -> Path:
    await _stored(tmp_path)
    return tmp_path


def test_causes_are_printed_with_evidence_and_remedy(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "shop/1", "--data", str(data)]) == 0
    assert capsys.readouterr().out == (
        "shop/1, subscription bills\n"
        "  not_asked: The data directory has only the saved progress: a process that serves the subscription was not "
        "asked.\n"
        "    evidence: subscription 'bills' has events that are not finished, as of its saved progress\n"
        "    do: If a silo serves it, ask the silo with --server; otherwise start one with its handler.\n"
    )
    assert main(["why", "shop/1", "--data", str(data), "--subscription", "none", "--json"]) == 0
    ((found),) = json.loads(capsys.readouterr().out)
    assert found["subscription"] is None
    assert [cause["code"] for cause in found["causes"]] == ["subscription_missing"]
    assert main(["why", "shop", "--data", str(data)]) != 0


@pytest.mark.parametrize("present", [["one"], ["one", "two"], []])
async def test_gaps_of_broadcast_consumers_are_named(tmp_path: Path, present: list[str]) -> None:
    broadcast = SubscriptionDefinition(name="news", selector=Selector("shop/*"), mode=Mode.BROADCAST)
    token = SequenceToken(0)
    async with Provider.open(tmp_path, queues=1) as provider, AsyncExitStack() as consuming:
        await provider.create_subscription(broadcast)
        for consumer in present:
            await consuming.enter_async_context(provider.subscribe("news", consumer=consumer))
        await provider.publish(StreamId("shop", "1"), b"x")
        gap = GapRecord("default", "news~two", 0, None, token, token, "retention", 1)
        await provider.store.add_gaps([gap])
        (found,) = await explain_stream(provider, StreamId("shop", "2"), "news")
    assert found.causes[0].code == "retained_away"


@pytest.mark.long
def test_a_silo_that_does_not_answer_and_a_stopped_agent_are_named(tmp_path: Path, headrace: Headrace) -> None:
    with silos(tmp_path, "ab") as (asked, other):
        evenly(asked)
        at = ["--server", asked.address]
        assert headrace("subscriptions", "create", "bills", "shop/*", *at).code == 0

        def codes(key: int) -> list[str]:
            (found,) = headrace("why", f"shop/{key}", "--subscription", "bills", *at, "--json").json
            return [cause["code"] for cause in found["causes"]]

        other.signal(signal.SIGSTOP)
        first = [codes(key)[0] for key in range(8)]
        assert "owner_unreachable" in first
        assert "no_such_stream" in first
        other.signal(signal.SIGKILL)
        evenly(asked, "a")
        assert {codes(key)[0] for key in range(8)} == {"no_such_stream"}
        assert headrace("cluster", "stop-agents", *at).code == 0
        assert codes(1)[0] == "agent_stopped"
