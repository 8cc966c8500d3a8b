"""Seeks that the control store has lost, and positions of effects still know."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace import Client, Effects, Event, NotFound, Provider, StreamId, StreamState, Transaction, Unavailable
from headrace.effects.effects import EffectsInScope
from headrace.silo.backup import back_up, restore
from headrace.streams.lost_generations import CurrentGeneration, LostGenerations
from headrace.streams.transactions import EffectCounts, EffectScope
from tests.client.consumers import until
from tests.effects.databases import UserDatabase, user_database
from tests.effects.test_transactional_handlers import event_at, write_all_down, write_down
from tests.silo.services.calling import opened

STREAM = StreamId("orders", "42")


def in_scope(
    database: UserDatabase, generation: int, current: CurrentGeneration, **options: Any
) -> tuple[EffectsInScope, EffectCounts]:
    counts = EffectCounts()
    scope = EffectScope("here", "billing", 0, generation, lost=LostGenerations("billing", 0, generation, current))
    return Effects(database.engine, **options).scoped(write_down, scope, counts, batch=False), counts


def of(generation: int | None) -> CurrentGeneration:
    async def current() -> int | None:
        return generation

    return current


@pytest.mark.parametrize("options", [{}, {"state": StreamState()}], ids=["plain", "state"])
async def test_events_after_the_position_of_a_lost_seek_are_applied(
    database: UserDatabase, options: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    before, _ = in_scope(database, 7, of(7), **options)
    await before.call(event_at(5))
    after, counts = in_scope(database, 3, of(3), **options)
    with caplog.at_level(logging.WARNING):
        for offset in (4, 5, 6, 6, 8):
            await after.call(event_at(offset))
    assert (database.log(), counts.already_applied) == (["42@5", "42@6", "42@8"], 3)
    (warning,) = [record.message for record in caplog.records if "lost a seek" in record.message]
    assert warning.startswith(
        "subscription 'billing': the position of stream orders/42 has generation 7, and the control store "
        "has 3: it has lost a seek, for example by a restore; "
    )


async def test_failures_after_a_lost_seek_are_noted_and_redriven(database: UserDatabase):
    before, _ = in_scope(database, 7, of(7))
    await before.call(event_at(5))
    after, _ = in_scope(database, 3, of(3))
    await after.failed([event_at(6)])
    await after.given_up([event_at(6)])
    await after.call(event_at(6))
    assert database.log() == ["42@5"]
    again, _ = in_scope(database, 3, of(3))  # in a process that does not know the lost generation yet
    await again.redrive(event_at(6))
    assert database.log() == ["42@5", "42@6"]
    assert database.rows("SELECT outcome, generation FROM headrace_unapplied") == [("applied", 7)]


async def test_a_redrive_that_is_out_of_date_applies_nothing_and_keeps_the_dead_letter(database: UserDatabase):
    now, _ = in_scope(database, 7, of(7))
    await now.call(event_at(5))
    await now.failed([event_at(6)])
    late, _ = in_scope(database, 3, of(7))
    with pytest.raises(Unavailable, match="a seek moved the subscription"):
        await late.redrive(event_at(6))
    with pytest.raises(Unavailable, match="a seek moved the subscription"):
        async with late.transaction([event_at(6)], redriven=True):
            pass
    assert database.log() == ["42@5"]


async def test_a_scope_that_is_out_of_date_applies_nothing(database: UserDatabase):
    before, _ = in_scope(database, 7, of(7))
    await before.call(event_at(5))
    late, counts = in_scope(database, 3, of(7))
    await late.call(event_at(6))
    async with late.transaction([event_at(8)], redriven=False) as tx:
        assert tx.events == ()
    assert (database.log(), counts.already_applied) == (["42@5"], 2)


async def test_a_transaction_that_is_out_of_date_has_the_state(database: UserDatabase):
    async def count(_event: Event, tx: Transaction) -> None:
        tx.state = 7

    scope = EffectScope("here", "billing", 0, 7)
    effects = Effects(database.engine, state=StreamState())
    await effects.scoped(count, scope, EffectCounts(), batch=False).call(event_at(5))
    late, counts = in_scope(database, 3, of(7), state=StreamState())
    async with late.transaction([event_at(6)], redriven=False) as tx:
        assert (tx.events, tx.state) == ((), 7)
    assert counts.already_applied == 1


async def test_a_control_store_that_does_not_answer_is_an_outage(database: UserDatabase):
    async def away() -> int:
        raise Unavailable("away")

    async def deleted() -> int:
        raise NotFound("deleted")

    before, _ = in_scope(database, 7, of(7))
    await before.call(event_at(5))
    with pytest.raises(Unavailable, match="the generation of subscription 'billing' is not known: away"):
        await in_scope(database, 3, away)[0].call(event_at(6))
    await in_scope(database, 3, deleted)[0].call(event_at(6))
    with pytest.raises(Unavailable, match="is not known: the silo has an older version"):
        await in_scope(database, 3, of(None))[0].call(event_at(6))
    assert database.log() == ["42@5"]


def test_effects_after_a_restore_that_lost_a_seek(tmp_path: Path):
    asyncio.run(_restored(tmp_path))


async def _restored(folder: Path) -> None:
    applied: list[bytes] = []

    async def apply(event: Event, _tx: Transaction) -> None:
        applied.append(event.payload)

    async def publish(data: Path, payload: bytes, *, seek: bool = False) -> None:
        async with Provider.open(data, queues=1) as provider:
            billing = await provider.subscribe("billing", "orders/*", apply, start="earliest", effects=effects)
            await provider.stream("orders", "42").publish(payload)
            await billing.caught_up()
            if seek:
                seen = len(applied)
                await provider.seek("billing", "earliest")
                await until(lambda: len(applied) > seen)
                await billing.caught_up()

    async with user_database("sqlite", str(folder / "effects.db"), lambda: "") as database:
        effects = Effects(database.engine)
        await publish(folder / "data", b"a")
        await back_up(folder / "data", folder / "backup", lambda _: None)
        await publish(folder / "data", b"lost", seek=True)
        await restore(folder / "backup", folder / "restored", lambda _: None)
        applied.clear()
        await publish(folder / "restored", b"b")
        assert applied == [b"b"]
        await publish(folder / "restored", b"c", seek=True)
        assert applied == [b"b", b"c", b"a", b"b", b"c"]


async def test_batches_of_a_client_after_a_lost_seek(
    database: UserDatabase, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with opened(tmp_path / "data") as silo:
        assert silo.grpc_address is not None
        async with Client(silo.grpc_address) as client, client.subscribe("billing", "orders/*") as consumer:
            for payload in (b"a", b"b", b"c"):
                await client.stream("orders", "42").publish(payload)
                batch = await anext(consumer)
                async with batch.effects(Effects(database.engine)) as tx:
                    assert len(tx.events) == 1
                    await write_all_down(batch, tx)
                if payload == b"a":  # as if the control store had lost this generation
                    database.execute("UPDATE headrace_position SET generation = 7")
    assert database.log() == ["a", "b", "c"]
    assert len([record for record in caplog.records if "lost a seek" in record.message]) == 1
