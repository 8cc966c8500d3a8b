"""What looks after the groups of consumers."""

import asyncio
from pathlib import Path

import pytest

from headrace.silo import Provider, consumers
from headrace.silo.consumers import Consumers, Place
from headrace.streams import LimitExceeded, Mode, Selector
from headrace.streams.subscriptions import SubscriptionDefinition


async def test_a_group_that_cannot_be_looked_after_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Provider.open(tmp_path / "data", queues=1) as provider, Consumers.opened(provider, 10.0) as served:
        places: list[Place] = []
        for name in ("bad", "good"):
            definition = SubscriptionDefinition(name=name, selector=Selector("n/*"))
            await provider.create_subscription(definition)
            places.append(await served.join(definition, "c", 0.5))
        bad, good = places
        monkeypatch.setattr(bad.group, "tick", lambda: 1 // 0)
        async with asyncio.timeout(30):
            while good.group.members:  # noqa: ASYNC110 (that somebody went tells nobody)
                await asyncio.sleep(0.05)
        assert bad.group.members
        assert "looking at the consumers of bad failed" in caplog.text
        caplog.clear()


async def test_ids_with_mode_broadcast_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "MAX_POSITIONS", 3)
    definition = SubscriptionDefinition(name="s", selector=Selector("n/*"), mode=Mode.BROADCAST)
    says = r"'s' has positions of 3 consumers already.*under the id that it had"
    async with Provider.open(tmp_path / "data", queues=1) as provider, Consumers.opened(provider, 10.0) as served:
        await provider.create_subscription(definition)
        for number in range(3):
            await served.join(definition, f"c{number}", 10.0, None if number else {})
        with pytest.raises(LimitExceeded, match=says):
            await served.join(definition, "c3", 10.0)
    async with Provider.open(tmp_path / "data", queues=1) as provider, Consumers.opened(provider, 10.0) as served:
        await served.join(definition, "c1", 10.0)
        await served.join(definition, "c3", 10.0)  # nothing is kept of the one that keeps its position itself
        with pytest.raises(LimitExceeded, match=says):
            await served.join(definition, "c4", 10.0, {})
