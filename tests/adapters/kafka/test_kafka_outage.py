"""A silo whose brokers are away: commands that show its state, and the providers that are well."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kafka_servers import KafkaServer
from headrace import Selector, Start, SubscriptionDefinition
from headrace.server.config import GrpcConfig
from headrace.silo.config import ProviderConfig, SiloConfig
from headrace.silo.host import Silo
from tests.adapters.kafka.opening import new_topic
from tests.cli.commandline import ENVIRONMENT, SCRIPT

pytestmark = pytest.mark.slow  # starts a broker, and commands


@pytest.fixture
def own_broker() -> Iterator[KafkaServer]:
    with KafkaServer() as broker:
        yield broker


async def headrace(*arguments: str) -> tuple[int | None, str]:
    """Run a command. Return its exit code and its output. It must end within the time in which a user waits."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        SCRIPT, *arguments, env=ENVIRONMENT, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(15):
        output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_commands_work_while_the_brokers_of_a_provider_are_away(own_broker: KafkaServer, tmp_path: Path) -> None:
    options: dict[str, Any] = {"bootstrap": own_broker.address, "topic": new_topic()}
    events = tmp_path / "events"
    await asyncio.to_thread(events.write_text, "one\ntwo\n")
    config = SiloConfig(
        data=str(tmp_path / "data"),
        grpc=GrpcConfig(port=0),
        providers={
            "default": ProviderConfig(adapter="kafka", queues=4, options=options),
            "local": ProviderConfig(queues=2),
        },
    )
    async with Silo.opened(config) as silo:
        server = ["--server", silo.grpc_address or ""]
        await silo.providers["default"].stream("orders", "1").publish(b"x")
        await silo.providers["default"].create_subscription(
            SubscriptionDefinition(name="billing", selector=Selector("orders/*"), start=Start.earliest())
        )
        await asyncio.to_thread(own_broker.stop)
        code, output = await headrace(
            "publish", str(events), "--format", "raw", "--stream", "orders/2", *server, "--provider", "local"
        )
        assert code == 0, output
        code, output = await headrace("queues", *server, "--provider", "local")
        assert code == 0, output
        code, output = await headrace("cluster", *server)
        assert code == 0, output
        code, output = await headrace("queues", *server)
        assert code == 1, output
        assert "queue 3: its end is not known" in output
        code, output = await headrace("why", "orders/1", *server)
        assert code == 0, output
        code, output = await headrace("subscriptions", "show", "billing", *server)
        assert "its end is not known" in output
