"""A bank whose silo is killed again and again: money is conserved, and each transfer is applied exactly once.

Each transfer publishes an event through the outbox. A second subscription applies these exactly once, too.

`make test` kills twelve times, and `make long` eight times. `make chaos` kills more often: CHAOS_KILLS says how often.
CHAOS_SEED repeats a run.
"""

import asyncio
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest
from sqlalchemy import text

from headrace import Provider, StreamId
from tests.cli.commandline import ENVIRONMENT
from tests.cli.forking import Process, forking
from tests.effects.databases import UserDatabase, user_database
from tests.servers import PostgresServer, new_schema

KILLS = int(os.environ.get("CHAOS_KILLS", "8"))
"""Of the silo, for each database."""
SERVER_KILLS = max(KILLS // 2, 1)
SEED = int(os.environ.get("CHAOS_SEED", random.randrange(1 << 32)))
ACCOUNTS, STREAMS, AT_A_TIME, OPENING_BALANCE = 1000, 20, 100, 100
LIMIT_S = 60.0

Transfer = tuple[int, int, int, int]


class Bank:
    """The bank's database, its data directory, and the transfers that were published."""

    def __init__(self, database: UserDatabase, folder: Path) -> None:
        self.database = database
        self.folder = folder
        self.transfers: list[Transfer] = []
        self.rng = random.Random(SEED)
        database.execute("CREATE TABLE account (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL)")
        posting = "transfer INTEGER NOT NULL, target INTEGER NOT NULL, amount INTEGER NOT NULL"
        database.execute(f"CREATE TABLE posting ({posting})")
        database.execute("CREATE TABLE applied (transfer INTEGER NOT NULL)")
        with database.inspecting.begin() as connection:
            accounts = [{"id": number, "balance": OPENING_BALANCE} for number in range(ACCOUNTS)]
            connection.execute(text("INSERT INTO account VALUES (:id, :balance)"), accounts)

    async def publish(self, number: int) -> None:
        async with Provider.open(self.folder / "data", queues=4) as provider:
            first = len(self.transfers)
            for transfer in range(first, first + number):
                source, target = self.rng.sample(range(ACCOUNTS), 2)
                self.transfers.append((transfer, source, target, self.rng.randint(1, 50)))
            await asyncio.gather(
                *(
                    provider.publish(
                        StreamId("transfers", str(transfer[1] % STREAMS)), " ".join(map(str, transfer)).encode()
                    )
                    for transfer in self.transfers[first:]
                )
            )

    def start_silo(self) -> Process:
        url = self.database.engine.url.render_as_string(hide_password=False)
        shutil.copy(Path(__file__).with_name("bank.py"), self.folder)
        return forking().start(
            ["silo", "--data", "data", "--module", "bank"],
            cwd=self.folder,
            env=ENVIRONMENT
            | {
                "BANK": url,
                "DELIVERED": str(self.folder / "delivered"),
                "HEADRACE_PROVIDERS__DEFAULT__OUTBOX": self.database.url,
            },
        )

    def applied(self) -> int:
        return self.database.rows("SELECT COUNT(*) FROM applied")[0][0]

    def wait_until_applied(self, silo: Process, number: int) -> None:
        first = min(self.applied() + 1, number)
        self.wait_until(silo, lambda: self.applied() >= first, every_s=0.05)  # a silo that starts needs the processor
        self.wait_until(silo, lambda: self.applied() >= number)

    def wait_until_posted(self, silo: Process) -> None:
        """Wait until the second subscription has all events of the outbox."""
        count = "SELECT (SELECT COUNT(*) FROM posting), (SELECT COUNT(*) FROM headrace_outbox)"
        self.wait_until(silo, lambda: self.database.rows(count)[0] == (len(self.transfers), 0))

    def wait_until(self, silo: Process, condition: Callable[[], bool], every_s: float = 0.005) -> None:
        """Wait. LIMIT_S without progress is a failure."""
        reached, end = -1, 0.0
        while not condition():
            assert silo.poll() is None, "the silo has ended"
            if (progress := self.progress()) != reached:
                reached, end = progress, monotonic() + LIMIT_S
            assert monotonic() < end, f"{self.applied()} of {len(self.transfers)} are applied"
            sleep(every_s)

    def progress(self) -> int:
        """How many transfers both subscriptions applied, in all."""
        return self.applied() + self.database.rows("SELECT COUNT(*) FROM posting")[0][0]

    def audit(self) -> None:
        """Compare the database with the transfers that were published."""
        assert self.database.rows("SELECT SUM(balance) FROM account") == [(ACCOUNTS * OPENING_BALANCE,)]
        applied = [number for (number,) in self.database.rows("SELECT transfer FROM applied ORDER BY transfer")]
        assert applied == list(range(len(self.transfers)))
        posted = self.database.rows("SELECT transfer, target, amount FROM posting ORDER BY transfer")
        assert posted == [(number, target, amount) for number, _, target, amount in self.transfers]
        expected = Counter(dict.fromkeys(range(ACCOUNTS), OPENING_BALANCE))
        for _, source, target, amount in self.transfers:
            expected[source] -= amount
            expected[target] += amount
        assert dict(map(tuple, self.database.rows("SELECT id, balance FROM account"))) == dict(expected)  # pyright: ignore[reportArgumentType]

    def deliveries(self) -> int:
        return (self.folder / "delivered").read_bytes().count(b"\n")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["aiosqlite", pytest.param("psycopg-async", marks=pytest.mark.long)])
async def test_kills_of_the_silo_neither_lose_nor_repeat_a_transfer(
    kind: str, tmp_path: Path, schema_url: Callable[[], str]
):
    print(f"CHAOS_SEED={SEED}")
    async with user_database(kind, str(tmp_path / "bank.db"), schema_url) as database:
        bank = Bank(database, tmp_path)
        for _ in range(KILLS):
            await bank.publish(AT_A_TIME)
            silo = bank.start_silo()
            bank.wait_until_applied(silo, bank.applied() + bank.rng.randint(1, AT_A_TIME // 2))
            before = bank.deliveries()
            await bank.publish(5)  # their checkpoint comes up to 0.1 s later
            bank.wait_until(silo, lambda before=before: bank.deliveries() > before)
            await asyncio.sleep(bank.rng.uniform(0, 0.05))
            silo.kill()
            silo.wait(30)
        silo = bank.start_silo()
        bank.wait_until_applied(silo, len(bank.transfers))
        bank.wait_until_posted(silo)
        silo.send_signal(signal.SIGTERM)
        assert silo.wait(30) == 0
        bank.audit()
        assert bank.deliveries() > len(bank.transfers), "no kill came between a commit and a checkpoint"


@pytest.mark.timeout(3600)
async def test_kills_of_postgresql_neither_lose_nor_repeat_a_transfer(tmp_path: Path):
    with PostgresServer() as server:
        async with user_database("psycopg-async", "", lambda: new_schema(server)) as database:
            bank = Bank(database, tmp_path)
            await bank.publish(AT_A_TIME)
            silo = bank.start_silo()
            for _ in range(SERVER_KILLS):
                bank.wait_until_applied(silo, bank.applied() + bank.rng.randint(1, AT_A_TIME // 4))
                server.kill()
                database.inspecting.dispose()
                await bank.publish(AT_A_TIME)
                server.start()
            bank.wait_until_applied(silo, len(bank.transfers))
            bank.wait_until_posted(silo)
            silo.send_signal(signal.SIGTERM)
            assert silo.wait(30) == 0
            bank.audit()
            async with Provider.open(tmp_path / "data") as provider:
                assert await provider.dead_letters() == []  # an outage is not the fault of an event
