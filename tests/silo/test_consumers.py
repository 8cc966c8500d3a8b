"""What looks after the groups of consumers."""

import asyncio
from pathlib import Path

import pytest

from headrace.silo import Provider
from headrace.silo.consumers import Consumers, Place
from headrace.streams import Selector
from headrace.streams.subscriptions import SubscriptionDefinition


async def test_a_group_that_cannot_be_looked_after_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Provider.open(tmp_path / "data", queues=1) as provider, Consumers.opened(provider, 10.0) as consumers:
        places: list[Place] = []
        for name in ("bad", "good"):
            definition = SubscriptionDefinition(name=name, selector=Selector("n/*"))
            await provider.create_subscription(definition)
            places.append(await consumers.join(definition, "c", 0.5))
        bad, good = places
        monkeypatch.setattr(bad.group, "tick", lambda: 1 // 0)
        async with asyncio.timeout(30):
            while good.group.members:  # noqa: ASYNC110 (that somebody went tells nobody)
                await asyncio.sleep(0.05)
        assert bad.group.members
        assert "looking at the consumers of bad failed" in caplog.text
        caplog.clear()
