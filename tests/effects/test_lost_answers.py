"""The database fails at the worst moment: as it commits, while it is restored, or by kill -9."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from headrace import Effects, Provider, Unavailable
from tests.effects.databases import UserDatabase, close, engine, user_database
from tests.effects.test_transactional_handlers import event_at, in_scope, write_down

CHUNK = 1 << 16


class CommitCutter:
    """Forwards to a PostgreSQL server. Breaks a connection when the answer to its COMMIT comes back."""

    def __init__(self, host: str, port: int, commit: bytes = b"COMMIT") -> None:
        """`commit` is a part of the message that commits, and of no other."""
        self._target = host, port
        self._commit = commit
        self.cuts = 0
        self.cutting = True
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[int]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there, back = await asyncio.open_connection(*self._target)
        commits = asyncio.Event()

        async def forth() -> None:
            while data := await reader.read(CHUNK):
                if self._commit in data and self.cutting:
                    commits.set()
                back.write(data)

        async def answers() -> None:
            while data := await there.read(CHUNK):
                if commits.is_set():
                    self.cuts += 1
                    return
                writer.write(data)

        directions = [asyncio.create_task(forth()), asyncio.create_task(answers())]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.transport.abort()
            back.transport.abort()
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)


@pytest.mark.parametrize("kind", ["psycopg-async", "asyncpg"])
async def test_a_commit_whose_answer_is_lost_is_not_repeated(kind: str, schema_url: Callable[[], str]):
    async with user_database(kind, "", schema_url) as database:
        url = make_url(database.url)
        cutter = CommitCutter(str(url.host), int(url.port or 0))
        async with cutter.serving() as port:
            through = engine(kind, url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False))
            cut = UserDatabase(kind, database.url, through, database.inspecting)
            effects, counts = in_scope(cut, write_down)
            with pytest.raises(Unavailable):
                await effects.call(event_at(5))
            assert cutter.cuts == 1
            cutter.cutting = False
            await effects.call(event_at(5))
            assert (database.log(), counts.already_applied) == (["42@5"], 1)
            await close(through)


async def test_a_database_that_is_restored_gets_its_effects_again_by_a_seek(tmp_path: Path):
    file, backup = tmp_path / "user.db", tmp_path / "backup.db"
    async with user_database("aiosqlite", str(file), lambda: "") as database:
        async with Provider.open(tmp_path / "data", queues=1) as provider:
            options: Any = {"effects": Effects(database.engine)}
            one = await provider.subscribe("billing", "orders/*", write_down, **options)
            stream = provider.stream("orders", "42")
            await stream.publish(b"a")
            await one.caught_up()
            await close(database.engine)
            database.inspecting.dispose()
            shutil.copy(file, backup)
            await stream.publish(b"b")
            await one.caught_up()
            await close(database.engine)
            database.inspecting.dispose()
            shutil.copy(backup, file)
            assert database.log() == ["a"]
            database.execute("DELETE FROM log")
            await one.seek("earliest")
            await one.caught_up()
            assert database.log() == ["a", "b"]
