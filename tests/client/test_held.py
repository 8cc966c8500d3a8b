"""Subscriptions that are held while a dependency of their consumers is down: their state in a silo."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import pytest

from headrace import Client, Event, Provider, RetryPolicy, Unavailable
from headrace.silo.lag_history import LagHistory
from headrace.silo.metric_snapshots import Snapshot, provider_snapshot
from headrace.silo.metrics import render
from headrace.streams.states import SubscriptionHold
from tests.client.consumers import PATIENCE_S, publish, until
from tests.silo.services.calling import opened

RETRY = RetryPolicy(max_attempts=3, initial_delay_s=0.01, max_delay_s=0.5)


class Bank:
    """A service that a handler depends on."""

    def __init__(self, error: type[Exception]) -> None:
        self.error: type[Exception] | None = error
        self.paid = 0

    async def pay(self, event: Event) -> None:
        if self.error is not None:
            raise self.error("the bank is closed")
        self.paid += 1


async def held_in(client: Client, name: str) -> SubscriptionHold:
    """Return once it is held."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if (held := (await client.subscription(name)).held) is not None:
                return held
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("error", "streams"), [(ConnectionError, "abcdefgh"), (Unavailable, "a")], ids=["many streams", "one stream"]
)
async def test_a_clients_handler_survives_an_outage(tmp_path: Path, error: type[Exception], streams: str):
    bank, began_us = Bank(error), time.time_ns() // 1000
    async with opened(tmp_path / "data") as silo, Client(silo.grpc_address or "") as client:
        await publish(client, streams, 3)
        subscription = await client.subscribe("s", "orders/*", bank.pay, start="earliest", retry=RETRY)
        held = await held_in(client, "s")
        assert held.reason == f"{error.__name__}: the bank is closed"
        assert began_us <= held.since_us <= time.time_ns() // 1000
        bank.error = None
        await subscription.caught_up()
        assert bank.paid == 3 * len(streams)
        assert await client.dead_letters() == []


async def test_commands_tell_of_a_subscription_that_is_held(tmp_path: Path):
    bank = Bank(Unavailable)
    async with opened(tmp_path / "data") as silo, Client(silo.grpc_address or "") as client:
        await publish(client, "a", 1)
        await client.subscribe("s", "orders/*", bank.pay, start="earliest", retry=RETRY)
        held = await held_in(client, "s")
        server = ("--server", silo.grpc_address or "")
        for said in await asyncio.gather(
            _said("subscriptions", "list", *server), _said("subscriptions", "show", "s", *server)
        ):
            assert "subscription 's' is held since " in said
            assert said.rstrip().endswith(held.reason)


async def test_a_subscription_that_is_held_says_so(tmp_path: Path):
    bank = Bank(ConnectionError)
    async with Provider.open(tmp_path, queues=2) as provider:
        for key in "abcdefgh":
            await provider.stream("orders", key).publish(b"1")
        subscription = await provider.subscribe("s", "orders/*", bank.pay, start="earliest", retry=RETRY)
        await until(lambda: provider.statistics().subscriptions[0].held)
        view = provider.statistics().subscriptions[0]
        assert view.state == "held"
        assert view.reason.endswith(": ConnectionError: the bank is closed")
        sample = 'headrace_subscription_held{provider="default",subscription="s"} 1.0'
        snapshot = Snapshot([provider_snapshot(provider, LagHistory({}))])
        metrics = await asyncio.to_thread(render, snapshot)  # it reads files of /proc
        assert sample in metrics.decode()
        bank.error = None
        await subscription.caught_up()
        assert bank.paid == 8


async def test_without_a_circuit_breaker_events_are_given_up_on(tmp_path: Path):
    bank = Bank(ConnectionError)
    async with opened(tmp_path / "data") as silo, Client(silo.grpc_address or "") as client:
        await publish(client, "abcdefgh", 1)
        subscription = await client.subscribe(
            "s", "orders/*", bank.pay, start="earliest", retry=RETRY, circuit_breaker=False
        )
        await subscription.caught_up()
        assert (await client.subscription("s")).definition.circuit_breaker is False
        assert len(await client.dead_letters()) == 8


async def _said(*words: str) -> str:
    """The notes of a command."""
    program = Path(sys.executable).with_name("headrace")
    command = await asyncio.create_subprocess_exec(program, *words, stdout=DEVNULL, stderr=PIPE)
    _, notes = await command.communicate()
    assert command.returncode == 0
    return notes.decode()
