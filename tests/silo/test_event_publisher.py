"""Publishes that an adapter refuses at once."""

import asyncio

import pytest

from headrace import EventBatch, InvalidArgument, Provider, StreamId


async def test_a_batch_that_is_refused_at_once_is_no_open_publish():
    async with Provider.open(adapter="memory", queues=1, options={"capacity": 1}) as provider:
        with pytest.raises(InvalidArgument, match="never fits"):
            await provider.publish_encoded([EventBatch.of(StreamId("orders", "1"), [b"first", b"second"])])
        assert provider.publishing.under_way == 0
        assert provider.publishing.errors["invalid_argument"] == 1
        await asyncio.wait_for(provider.flush(), 5)
