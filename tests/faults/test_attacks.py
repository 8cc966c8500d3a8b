"""The attackers of `test_grpc_fuzz.py` end, whatever the silo does."""

import asyncio

import pytest

from headrace.server.methods import MethodKind, ServiceCall, ServiceMethod
from tests.faults.attacks import Attacker
from tests.silo.services.calling import PUBLISH, offering


async def accept(call: ServiceCall, request: bytes) -> bytes:
    return b""


async def read_nothing(call: ServiceCall) -> None:
    await asyncio.Event().wait()


@pytest.mark.long
async def test_consumers_whose_requests_are_not_read_hang_up() -> None:
    subscribe = ServiceMethod("headrace.v1.ConsumerService/Subscribe", MethodKind.STREAM, read_nothing)
    async with offering(ServiceMethod(PUBLISH, MethodKind.UNARY, accept), subscribe) as caller:
        async with asyncio.timeout(100):
            await Attacker(caller.address, 0, seed=1, write_s=0.2).sessions()
