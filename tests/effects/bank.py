"""A bank for `headrace silo --module`: transfers are events, and their effects are in the database BANK."""

import os

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from headrace import Effects, Event, StreamId, Transaction, subscription

MOVE = text("UPDATE account SET balance = balance + :amount WHERE id = :id")
NOTE = text("INSERT INTO applied (transfer) VALUES (:transfer)")

POST = text("INSERT INTO posting (transfer, target, amount) VALUES (:transfer, :target, :amount)")
STREAMS = 20

engine = create_async_engine(os.environ["BANK"])
delivered = os.open(os.environ["DELIVERED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@subscription("bank", "transfers/*", start="earliest", effects=Effects(engine))
async def transfer(event: Event, tx: Transaction) -> None:
    number, source, target, amount = map(int, event.payload.split())
    moves = [{"id": source, "amount": -amount}, {"id": target, "amount": amount}]
    for move in sorted(moves, key=lambda move: move["id"]):  # all transactions lock accounts in one order
        await tx.execute(MOVE, move)
    await tx.execute(NOTE, {"transfer": number})
    await tx.publish(StreamId("postings", str(target % STREAMS)), event.payload)


@subscription("ledger", "postings/*", start="earliest", effects=Effects(engine))
async def post(event: Event, tx: Transaction) -> None:
    """Keep sums of its own, from the events of the outbox."""
    number, _, target, amount = map(int, event.payload.split())
    await tx.execute(POST, {"transfer": number, "target": target, "amount": amount})


@subscription("counter", "transfers/*", start="earliest")
async def count(event: Event) -> None:
    """Count deliveries without effects: kills repeat some."""
    os.write(delivered, event.payload.split()[0] + b"\n")
