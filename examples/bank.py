"""A bank: transfers are events, and each changes two accounts in one transaction, exactly once.

Run it as it is: `python examples/bank.py`. It keeps its events in ./bank-data and its accounts in ./bank.db. Kill it at
any moment and run it again: the sum of all accounts stays 300. Its tests are in `tests/examples/test_bank.py`.
"""

from __future__ import annotations

import asyncio
import json

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from headrace import Effects, Event, Provider, StreamState, Transaction
from headrace.effects import schema


def create_tables(engine: Engine) -> None:
    with engine.begin() as connection:
        schema.migrate(connection)  # as `headrace effects migrate sqlite:///bank.db` does
        connection.execute(text("CREATE TABLE IF NOT EXISTS account (name TEXT PRIMARY KEY, balance INTEGER NOT NULL)"))
        connection.execute(text("INSERT INTO account VALUES ('a', 100), ('b', 100), ('c', 100) ON CONFLICT DO NOTHING"))


def move(session: Session, source: str, target: str, amount: int) -> None:
    change = text("UPDATE account SET balance = balance + :amount WHERE name = :name")
    session.execute(change, [{"name": source, "amount": -amount}, {"name": target, "amount": amount}])


async def transfer(event: Event, tx: Transaction) -> None:
    order = json.loads(event.payload)
    await tx.run(move, order["from"], order["to"], order["amount"])
    tx.state = (tx.state or 0) + 1  # the number of transfers of this stream, in the same commit


async def serve(provider: Provider, engine: Engine) -> None:
    effects = Effects(engine, state=StreamState())
    await provider.subscribe("bank", "transfers/*", transfer, start="earliest", effects=effects)


async def order_transfers(provider: Provider) -> None:
    for source, target, amount in (("a", "b", 30), ("b", "c", 50), ("c", "a", 5)):
        order = {"from": source, "to": target, "amount": amount}
        await provider.stream("transfers", source).publish(json.dumps(order).encode())


def balances(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT name, balance FROM account ORDER BY name"))
        return {row.name: row.balance for row in rows}


async def main() -> None:
    engine = create_engine("sqlite:///bank.db")
    await asyncio.to_thread(create_tables, engine)
    async with Provider.open("bank-data") as provider:
        await serve(provider, engine)
        await order_transfers(provider)
        await provider.caught_up("bank")
    for name, balance in balances(engine).items():
        print(f"{name}: {balance}")


if __name__ == "__main__":
    asyncio.run(main())
