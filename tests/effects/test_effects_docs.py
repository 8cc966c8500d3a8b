"""docs/effects.md: its patterns run as they are written."""

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from headrace import Client, Event, Outbox, StreamId, Transaction
from tests.client.consumers import until
from tests.effects.databases import UserDatabase, close, user_database
from tests.effects.test_django import in_django
from tests.effects.test_transactional_handlers import batch_at, event_at, in_scope
from tests.silo.services.calling import opened

migrations: Any = import_module("django.db.migrations")

TEXT = (Path(__file__).parents[2] / "docs" / "effects.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
PURCHASES = "SELECT customer FROM purchase"


def example(containing: str) -> str:
    (found,) = [each for each in EXAMPLES if containing in each]
    return found


def executed(source: str, **names: Any) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "example", **names}
    exec(compile(source, "docs/effects.md", "exec", dont_inherit=True), scope)
    return scope


def with_tables(database: UserDatabase) -> None:
    for table in ("purchase", "invoice"):
        database.execute(f"CREATE TABLE {table} (customer TEXT NOT NULL)")


@pytest.mark.long
async def test_the_pattern_with_fastapi(tmp_path: Path, schema_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    async with user_database("psycopg-async", "", schema_url) as database:
        with_tables(database)
        url = database.url.replace("postgresql:", "postgresql+psycopg:")
        source = example("FastAPI(lifespan").replace("postgresql+psycopg://localhost/shop", url)
        scope = executed(source.replace("postgresql://localhost/shop", database.url))
        app = scope["app"]
        async with app.router.lifespan_context(app), AsyncClient(transport=ASGITransport(app)) as client:
            for customer in ("a", "b"):
                assert (await client.post(f"http://shop/orders/{customer}")).status_code == 200
            await until(lambda: len(database.rows("SELECT * FROM invoice")) == 2)
            await until(lambda: not database.rows("SELECT * FROM headrace_outbox"))
        assert sorted(database.rows("SELECT customer FROM invoice")) == [("a",), ("b",)]
        await close(scope["engine"])


async def test_the_pattern_with_django(schema_url: Callable[[], str]):
    async with user_database("psycopg", "", schema_url, migrated=False) as database:
        with_tables(database)
        migration = executed(example("migrations.Migration"))["Migration"]

        def work(connection: Any) -> None:
            with connection.schema_editor() as editor:
                for operation in migration.operations:
                    assert isinstance(operation, migrations.RunSQL)
                    operation.database_forwards("shop", editor, None, None)
            executed(example("cursor.execute"))["order"]("a")
            assert Outbox().published(connection=connection) == [(StreamId("orders", "a"), b"ordered")]

        await asyncio.to_thread(in_django, database.url, work)
        assert database.rows(PURCHASES) == [("a",)]


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "asyncpg"])
async def test_the_examples_of_errors_that_a_handler_catches(kind: str, schema_url: Callable[[], str]):
    names = {"text": text, "IntegrityError": IntegrityError, "Session": Session, "suppress": suppress}
    examples = ["def add_customer"] if kind == "psycopg" else ["def add_customer", "tx.connection.begin_nested()"]

    async def handle(event: Event, tx: Transaction) -> None:
        for containing in examples * 2:
            lines = "".join(f"    {line}\n" for line in example(containing).splitlines())
            await executed(f"async def run(tx, key):\n{lines}", **names)["run"](tx, "42")

    async with user_database(kind, "", schema_url) as database:
        database.execute("CREATE TABLE customer (id TEXT PRIMARY KEY)")
        effects, _ = in_scope(database, handle)
        await effects.call(event_at(5))
        assert database.rows("SELECT id FROM customer") == [("42",)]


async def test_the_example_of_a_handler_of_batches(schema_url: Callable[[], str]):
    async with user_database("psycopg-async", "", schema_url) as database:
        database.execute("CREATE TABLE account (id TEXT, balance INTEGER)")
        database.execute("INSERT INTO account VALUES ('42', 10)")
        body = re.sub("^@subscription.*\n", "", example("batch: EventBatch"), flags=re.MULTILINE)
        scope = executed(body, text=text, Transaction=Transaction)
        effects, _ = in_scope(database, scope["billing"], batch=True)
        await effects.call(batch_at(5, 3))
        assert database.rows("SELECT balance FROM account") == [(7,)]


async def test_the_example_of_a_consumer_applies_a_batch(tmp_path: Path, schema_url: Callable[[], str]):
    async with opened(tmp_path / "data") as silo, user_database("psycopg-async", "", schema_url) as database:
        database.execute("CREATE TABLE account (id TEXT, balance INTEGER)")
        database.execute("INSERT INTO account VALUES ('42', 10)")
        body = example("batch.effects(engine)").replace('"127.0.0.1:9465"', repr(silo.grpc_address))
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        scope = executed(f"async def run():\n{lines}", Client=Client, engine=database.engine, text=text)
        async with Client(str(silo.grpc_address)) as client:
            running = asyncio.create_task(scope["run"]())
            async with asyncio.timeout(30):
                while not await client.subscriptions():  # noqa: ASYNC110 (another task subscribes)
                    await asyncio.sleep(0.05)
            await client.stream("orders", "42").publish([b"x", b"y"])
            await until(lambda: database.rows("SELECT balance FROM account") == [(8,)])
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
