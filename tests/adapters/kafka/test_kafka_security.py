"""Clients that prove their identity in each way that Kafka has, those that are refused, and secrets, which no output
has. One broker has a listener for each way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.streams.errors import StorageError
from tests.adapters.kafka.opening import QUICK, batch, new_topic, opened, received
from tests.adapters.kafka.secure_broker import PASSWORD, SecureBroker
from tests.certificates import Authority
from tests.cli.commandline import ENVIRONMENT

pytestmark = pytest.mark.slow
WRONG = "wrong-password-7"
PATIENT = QUICK._replace(request_s=10.0)

Settings = Mapping[str, str | bool]
MakeSettings = Callable[[SecureBroker], Settings]

ACCEPTED: Sequence[tuple[str, MakeSettings]] = [
    ("TLS", SecureBroker.tls),
    ("MUTUAL", SecureBroker.mutual),
    ("PLAIN", lambda broker: broker.password("PLAIN")),
    ("SCRAM", lambda broker: broker.password("SCRAM-SHA-512")),
    ("TOKEN", SecureBroker.token),
]
REFUSED: Sequence[tuple[str, MakeSettings, str]] = [
    ("MUTUAL", SecureBroker.tls, "alert bad certificate"),
    ("PLAIN", lambda broker: broker.password("PLAIN", WRONG), "check kafka.sasl.mechanism, kafka.sasl.username"),
    ("SCRAM", lambda broker: broker.password("SCRAM-SHA-512", WRONG), "invalid credentials.*: check kafka.sasl"),
    ("PLAIN", lambda broker: broker.password("SCRAM-SHA-512"), "broker's supported mechanisms: PLAIN"),
    ("TLS", lambda _: {}, "check bootstrap and kafka.security.protocol"),  # a client without TLS
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    broker = SecureBroker(tmp_path_factory.mktemp("secure"))
    with broker.server:
        yield broker


@pytest.mark.parametrize(("listener", "settings"), ACCEPTED)
async def test_events_flow_for_a_client_that_proves_its_identity(
    broker: SecureBroker, listener: str, settings: MakeSettings
) -> None:
    address = broker.bootstrap(listener)
    async with opened(address, new_topic(), limits=PATIENT, kafka=settings(broker)) as adapter:
        await adapter.enqueue([(0, batch("x"))])
        assert await received(await adapter.open_receiver(0), 1) == ["x"]
        stored = json.dumps(adapter.location)
        assert PASSWORD not in stored
        assert "principal" not in stored


@pytest.mark.parametrize(("listener", "settings", "reason"), REFUSED)
async def test_refusal_is_one_line_with_its_reason(
    broker: SecureBroker, listener: str, settings: MakeSettings, reason: str
) -> None:
    await check_refused(broker.bootstrap(listener), settings(broker), reason)


async def test_certificate_of_an_unknown_authority_is_refused_in_one_line(broker: SecureBroker, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other").certificate
    settings = {**broker.tls(), "ssl.ca.location": str(other)}
    await check_refused(broker.bootstrap("TLS"), settings, r"certificate verify failed.*: check kafka\.ssl\.ca\.loca")


async def check_refused(address: str, settings: Settings, reason: str) -> None:
    with pytest.raises(StorageError, match=reason) as refused:
        async with opened(address, new_topic(), kafka=settings):
            pass
    text = str(refused.value)
    assert "\n" not in text
    assert PASSWORD not in text
    assert WRONG not in text


@pytest.mark.parametrize(("listener", "mechanism"), [("PLAIN", "PLAIN"), ("SCRAM", "SCRAM-SHA-512")])
def test_no_output_and_no_file_has_a_password(
    broker: SecureBroker, tmp_path: Path, listener: str, mechanism: str
) -> None:
    """Also if everything is logged."""
    topic = new_topic()
    options: dict[str, Any] = {"bootstrap": broker.bootstrap(listener), "topic": topic}
    options["kafka"] = broker.password(mechanism)
    program = f"""
import asyncio, logging
from headrace import Provider

logging.basicConfig(level=logging.DEBUG)

async def main():
    options = {options!r}
    async with Provider.open("data", adapter="kafka", queues=1, options=options) as provider:
        await provider.stream("a", "b").publish(b"x")
        print(provider.adapter.location)
    options["kafka"]["sasl.password"] = "{PASSWORD}-wrong"
    try:
        async with Provider.open("data", options=options):
            pass
    except Exception as error:
        print(error, repr(error))

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert topic in done.stdout  # the location, and the refusal
    assert "check kafka.sasl.mechanism" in done.stdout
    assert "DEBUG" in done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    stored = b"".join(path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file())
    assert PASSWORD.encode() not in stored
