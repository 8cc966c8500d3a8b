"""Stores each call of an idempotent producer once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from ...streams.errors import SequenceConflict
from ...streams.identity import SequenceToken
from ...streams.producer_ledger import LastCall
from ...streams.publishing import ProducerSequence, Receipt
from ..producer_turns import ProducerTurns
from .ledger import CALL, CallPart, ProducerState
from .ledgers import KafkaLedgers
from .publisher import OutgoingRecord

KNOWN_PRODUCERS = 100_000
"""Producers whose last call this process remembers. For others it reads the log once."""

Send = Callable[[Sequence[OutgoingRecord]], Awaitable[Sequence[int]]]
"""Stores records, and returns their offsets."""


class IdempotentCalls:
    """The idempotent producers of one provider, as this process knows them."""

    def __init__(self, ledgers: KafkaLedgers, send: Send) -> None:
        self._ledgers = ledgers
        self._send = send
        self._turns = ProducerTurns()
        self._known: dict[str, ProducerState] = {}

    async def last(self, producer: str) -> int:
        """Return the number of the last call that is stored as a whole, 0 if there is none."""
        async with self._turns.turn(producer):
            return (await self._read(producer)).last.number

    async def store_once(self, sequence: ProducerSequence, records: Sequence[OutgoingRecord]) -> Sequence[Receipt]:
        """Store the call, or its missing part. A call that is stored as a whole is not stored again. Raises
        SequenceConflict if earlier calls are missing."""
        async with self._turns.turn(sequence.producer):
            state = self._known.get(sequence.producer)
            if state is None or not state.last.accepts(sequence):  # another process may have stored later calls
                state = await self._read(sequence.producer)
            if not state.last.accepts(sequence):
                return state.last.answer(sequence, len(records))
            if sequence.number < state.begun:
                raise SequenceConflict(
                    f"producer {sequence.producer!r}: call {sequence.number} is older than call {state.begun}, a "
                    "part of which is stored: publish that one again"
                )
            return await self._store(state, sequence, records)

    async def _store(
        self, state: ProducerState, sequence: ProducerSequence, records: Sequence[OutgoingRecord]
    ) -> Sequence[Receipt]:
        producer, number, previous = sequence
        missing = state.missing(sequence, len(records))
        self._known.pop(producer, None)  # after a failure, the log has to be read
        if not records:
            await self._ledgers.store_empty(sequence)
        parts = [CallPart(producer, number, previous, index, len(records)) for index in missing]
        stored = await self._send([self._with_part(records[part.index], part) for part in parts])
        found = {index: offset for index, offset in state.parts.items() if index not in missing}
        found |= dict(zip(missing, stored, strict=True))
        offsets = [found[index] for index in range(len(records))]
        receipts = [
            Receipt(SequenceToken(offset), duplicate=index not in missing) for index, offset in enumerate(offsets)
        ]
        self._remember(producer, ProducerState(LastCall(number, offsets)))
        return receipts

    def _with_part(self, record: OutgoingRecord, part: CallPart) -> OutgoingRecord:
        header = CALL, part.encode(self._ledgers.partition_tags[record.partition])
        return record._replace(headers=[*(record.headers or ()), header])

    async def _read(self, producer: str) -> ProducerState:
        state = await self._ledgers.state(producer)
        if not state.begun:
            self._remember(producer, state)
        return state

    def _remember(self, producer: str, state: ProducerState) -> None:
        self._known.pop(producer, None)
        self._known[producer] = state
        if len(self._known) > KNOWN_PRODUCERS:
            del self._known[next(iter(self._known))]
