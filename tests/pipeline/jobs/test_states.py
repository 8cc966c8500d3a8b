"""States of streams as a Parquet file."""

import asyncio
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from sqlalchemy import create_engine

from headrace import InvalidArgument, StreamId, StreamState, Transaction
from headrace.effects import schema
from headrace.pipeline.jobs.states import ROWS, states
from tests.effects.conftest import schema_url
from tests.effects.databases import user_database
from tests.effects.test_transactional_handlers import event_at, in_scope
from tests.servers import postgres_server

__all__ = ("postgres_server", "schema_url")


def exported(url: str, file: Path, **chosen: Any) -> list[dict[str, Any]]:
    written = states(url, file, **chosen)
    rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    assert len(rows) == written
    return rows


@pytest.mark.long
@pytest.mark.parametrize("kind", ["aiosqlite", "psycopg-async"])
async def test_all_states_of_a_subscription_are_in_the_file(kind: str, tmp_path: Path, schema_url: Callable[[], str]):
    async def keep(event: Any, tx: Transaction) -> None:
        tx.state = {"last": event.payload.decode()}

    file = tmp_path / "states.parquet"
    async with user_database(kind, str(tmp_path / "user.db"), schema_url) as database:
        effects, _ = in_scope(database, keep, state=StreamState(ttl=timedelta(days=1), version=3))
        for key in ("b", "a"):
            await effects.call(event_at(5, stream=StreamId("orders", key)))
        assert await asyncio.to_thread(exported, database.url, file, subscription="other") == []
        rows = await asyncio.to_thread(exported, database.url, file, subscription="billing")
    assert [(row["stream"], json.loads(row["state"])["last"], row["offset"]) for row in rows] == [
        ("orders/a", "a@5", 5), ("orders/b", "b@5", 5),
    ]  # fmt: skip
    assert {(row["origin"], row["subscription"], row["version"]) for row in rows} == {("here", "billing", 3)}
    assert all(row["expires_at"] > datetime.now(UTC) for row in rows)
    assert not await asyncio.to_thread(lambda: [each for each in tmp_path.iterdir() if each.name.startswith(".")])


async def test_more_states_than_one_group_has(tmp_path: Path, schema_url: Callable[[], str]):
    async with user_database("sqlite", str(tmp_path / "user.db"), schema_url) as database:
        number = ROWS + 1
        database.execute(
            f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {number}) "
            "INSERT INTO headrace_position "
            "SELECT 'here', 'billing', 'orders/' || i, 1, 0, i, 0, 0, 1, 1, X'31', 1, NULL FROM n"
        )
        rows = await asyncio.to_thread(exported, database.url, tmp_path / "states.parquet")
    assert sorted(row["offset"] for row in rows) == list(range(1, number + 1))


def test_a_folder_that_is_missing_is_refused(tmp_path: Path):
    with pytest.raises(InvalidArgument, match="does not exist: create it first"):
        states("sqlite:///user.db", tmp_path / "no" / "states.parquet")


def test_a_pipe_is_refused_and_a_link_leads_to_the_file(tmp_path: Path):
    database, older, link, pipe = (tmp_path / name for name in ("user.db", "older", "link", "pipe"))
    engine = create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        schema.migrate(connection)
    engine.dispose()
    os.mkfifo(pipe)
    for wrong in (pipe, tmp_path):
        with pytest.raises(InvalidArgument, match="it is no regular file, and would be replaced by one"):
            states(f"sqlite:///{database}", wrong)
    assert pipe.is_fifo()
    older.write_text("older")
    link.symlink_to(older)
    assert exported(f"sqlite:///{database}", link) == []
    assert link.is_symlink()
    assert parquet.read_table(older).num_rows == 0
