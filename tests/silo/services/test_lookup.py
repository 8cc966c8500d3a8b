"""The answers about providers that a caller without any right to use them gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.proto.v1 import consumer_pb2, publisher_pb2, subscriptions_pb2
from tests.silo.services.calling import (
    PUBLISH,
    SUBSCRIPTIONS,
    Allowed,
    Caller,
    Refused,
    batch,
    connecting,
    make_tokens,
    opened,
)

CONSUMER = "headrace.v1.ConsumerService"
GET_PRODUCER = "headrace.v1.PublisherService/GetProducer"
FOR_CONSUMERS: list[tuple[str, Any, Any]] = [
    (f"{CONSUMER}/Pull", consumer_pb2.PullRequest(subscription="s", consumer="c"), consumer_pb2.PullResponse),
    (f"{CONSUMER}/Acknowledge", consumer_pb2.AcknowledgeRequest(subscription="s"), consumer_pb2.AcknowledgeResponse),
    *(
        (
            f"{SUBSCRIPTIONS}/{name}",
            getattr(subscriptions_pb2, f"{name}Request")(),
            subscriptions_pb2.GetSubscriptionResponse,
        )
        for name in ("GetSubscription", "ListSubscriptions", "AwaitCaughtUp", "ListDeadLetters", "ListGaps")
    ),
]
FOR_PRODUCERS: list[tuple[str, Any, Any]] = [
    (PUBLISH, publisher_pb2.PublishRequest(batches=[batch("a/1", b"x")]), publisher_pb2.PublishResponse),
    (GET_PRODUCER, publisher_pb2.GetProducerRequest(producer="p"), publisher_pb2.GetProducerResponse),
]


async def refusal(caller: Caller, method: str, request: Any, kind: Any, provider: str) -> Refused:
    asked = type(request)()
    asked.CopyFrom(request)
    asked.provider = provider
    with pytest.raises(Refused) as caught:
        await caller.ask(method, asked, kind)
    return caught.value


async def test_caller_without_permission_does_not_learn_the_names(tmp_path: Path):
    tokens = await make_tokens(tmp_path, writer=Allowed(publish=["a"]), reader=Allowed(subscribe=["a"]))
    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as channel:
        for token, calls in (("writer", FOR_CONSUMERS), ("reader", FOR_PRODUCERS)):
            caller = Caller(channel.channel, tokens[token])
            for call in calls:
                there, missing = [await refusal(caller, *call, provider) for provider in ("default", "missing")]
                assert (there.status, there.details) == (missing.status, missing.details), call[0]
                assert there.status == "PERMISSION_DENIED", call[0]


async def test_caller_with_a_permission_learns_that_another_name_is_missing(tmp_path: Path):
    tokens = await make_tokens(tmp_path, writer=Allowed(publish=["a"]))
    async with opened(tmp_path, auth="tokens") as silo, connecting(silo.grpc_address or "") as channel:
        caller = Caller(channel.channel, tokens["writer"])
        assert (await refusal(caller, *FOR_PRODUCERS[1], "missing")).status == "NOT_FOUND"
