"""Connecting to a silo: addresses, TLS, tokens, and the errors of failed connections."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace import (
    Closed,
    CorruptRecord,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    NotSupported,
    PayloadTooLarge,
    PermissionDenied,
    StorageError,
    StreamId,
    Unauthenticated,
    Unavailable,
)
from headrace.client.client import Client
from headrace.client.connection import GrpcTransport, SiloAddress, Tls, open_once, parse_addresses, status_error
from headrace.client.transport import StreamCall, Transport, reconnect_backoff, remote_error
from tests.certificates import Authority
from tests.cli.commandline import ENVIRONMENT, Headrace, Start, ended
from tests.client.silos import READY, SiloProcess, Silos
from tests.silo.services.calling import opened
from tests.simulation.virtual_time import virtual_time

S = StreamId("n", "k")


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("localhost:1", [SiloAddress("localhost", 1)]),
        ("10.0.0.7:65535", [SiloAddress("10.0.0.7", 65535)]),
        ("[::1]:80", [SiloAddress("::1", 80)]),
        ("a.example:1, b-c.example:2", [SiloAddress("a.example", 1), SiloAddress("b-c.example", 2)]),
    ],
)
def test_addresses_are_a_host_and_a_port(text: str, addresses: list[SiloAddress]):
    assert parse_addresses(text) == addresses
    assert parse_addresses(",".join(map(str, addresses))) == addresses


@pytest.mark.parametrize(
    "text", ["", "localhost", "localhost:", ":1", "a:0", "a:65536", "::1:1", "http://a:1", "a:1,", "a b:1", "a:１"]
)
def test_invalid_address_is_refused(text: str):
    with pytest.raises(InvalidArgument, match=r"is no address: write it as host:port"):
        parse_addresses(text)


@pytest.mark.parametrize(
    ("address", "loopback"), [("localhost:1", True), ("127.8.0.1:1", True), ("[::1]:1", True), ("10.0.0.1:1", False)]
)
def test_loopback_is_known(address: str, loopback: bool):
    assert parse_addresses(address)[0].loopback is loopback


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (1, Unavailable),
        (2, Unavailable),
        (3, InvalidArgument),
        (4, Unavailable),
        (5, NotFound),
        (7, PermissionDenied),
        (8, LimitExceeded),
        (12, NotSupported),
        (13, Unavailable),
        (14, Unavailable),
        (15, StorageError),
        (16, Unauthenticated),
        (11, HeadraceError),
    ],
)
def test_a_status_without_a_code_has_its_error(status: int, kind: type[HeadraceError]):
    error = status_error(status, "why", "here:1")
    assert type(error) is kind
    assert "here:1" in str(error)


def test_a_code_is_the_very_error():
    assert isinstance(remote_error("payload_too_large", "m"), PayloadTooLarge)
    assert isinstance(remote_error("corrupt_record", "m"), CorruptRecord)
    assert isinstance(remote_error("closed", "m"), Unavailable)
    assert remote_error("of_the_future", "m") is None


def test_pauses_grow_and_differ():
    pauses = [[reconnect_backoff().after(failures) for _ in range(50)] for failures in range(1, 8)]
    assert all(0.025 <= pause <= 0.05 for pause in pauses[0])
    assert all(0.5 <= pause <= 1.0 for pause in pauses[-1])
    assert len(set(pauses[3])) > 1


async def test_call_to_a_closed_port_raises():
    with pytest.raises(Unavailable, match=r"no silo answers at 127\.0\.0\.1:1 \(.*refused.*\): check the address"):
        async with Client("127.0.0.1:1", connect_timeout_s=0.2):
            pass


async def test_one_attempt_at_each_address_ends_at_once_if_all_refuse():
    transport = GrpcTransport("127.0.0.1:1,127.0.0.1:2")
    try:
        with pytest.raises(Unavailable, match=r"no silo answers at 127\.0\.0\.1:2 \(.*refused"):
            await open_once(transport, timeout_s=3600)
    finally:
        await transport.aclose()


async def test_something_else_is_no_silo():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(NotSupported, match="check that it is a headrace silo"):
            async with Client(f"127.0.0.1:{port}"):
                pass
    finally:
        await server.stop(None)


async def test_impossible_arguments_are_refused_at_once():
    wrong: list[dict[str, Any]] = [
        {"timeout_s": 0}, {"connect_timeout_s": -1}, {"token": "a b"}, {"token": ""}, {"token": "a\n"}
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(InvalidArgument):
            Client("localhost:1", **options)
    with pytest.raises(InvalidArgument, match="go together"):
        Tls(certificate="file")


def test_a_token_is_not_sent_unencrypted_to_another_machine():
    Client("localhost:1,[::1]:2", token="hr_x")
    Client("silo.example:1", token="hr_x", insecure=True)
    Client("silo.example:1", token="hr_x", tls=True)
    with pytest.raises(InvalidArgument, match=r"the token would go to silo\.example:1 unencrypted"):
        Client("localhost:1,silo.example:1", token="hr_x")


async def test_without_a_token_or_with_a_wrong_one_nothing_opens(headrace: Headrace, silos: Silos):
    right = headrace("tokens", "create", "t", "--data", "d", "--publish", "*").out.strip()
    silo = silos("--auth", "tokens")
    for wrong in (None, "hr_" + "A" * 43):
        with pytest.raises(Unauthenticated) as caught:
            async with Client(silo.address, token=wrong):
                pass
        assert "hr_AAA" not in str(caught.value)
    async with Client(silo.address, token=right) as client:
        await client.publish(S, b"")
        with pytest.raises(PermissionDenied):
            await client.subscription("s")


async def without_end(client: Client) -> None:
    while True:
        await client.publish(S, b"")


async def test_a_revoked_token_ends_the_client_s_publishing(headrace: Headrace, silos: Silos):
    token = headrace("tokens", "create", "t", "--data", "d", "--publish", "*").out.strip()
    silo = silos("--auth", "tokens")
    async with Client(silo.address, token=token) as client:
        await client.publish(S, b"")
        headrace("tokens", "revoke", "t", "--data", "d")
        with pytest.raises(Unauthenticated):
            await without_end(client)


async def test_tls_checks_the_silo(silos: Silos, tmp_path: Path):
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    own = authority.issue("localhost", "127.0.0.1")
    silo = silos("--certificate", str(own.certificate), "--key", str(own.key))
    async with Client(silo.address, tls=Tls(ca=authority.certificate)) as client:
        await client.publish(S, b"")
    async with Client(silo.address, tls=Tls(ca=authority.certificate.read_bytes())) as client:
        await client.publish(S, b"")
    for wrong, says in (
        (None, r"whether it requires TLS \(tls\) or a client's certificate \(tls\.certificate\)$"),
        (True, r"^tls\.ca: .* is not trusted: give the certificate of its authority, or renew"),
        (
            Tls(ca=other.certificate),
            r"^tls\.ca: .* is not trusted: give the certificate of its authority, or renew",
        ),
    ):
        with pytest.raises(Unavailable, match=says):
            async with Client(silo.address, tls=wrong, connect_timeout_s=0.2):
                pass


async def test_a_certificate_for_another_name_is_named(tmp_path: Path):
    authority = Authority(tmp_path)
    own = authority.issue("silo.example")
    async with opened(tmp_path / "data", certificate=str(own.certificate), key=str(own.key)) as silo:
        transport = GrpcTransport(silo.grpc_address or "", tls=Tls(ca=authority.certificate))
        says = r"^address: the certificate of the silo at 127\.0\.0\.1:\d+ is not for that name: add the name to"
        with pytest.raises(Unavailable, match=says):
            await open_once(transport, 30)
        await transport.aclose()


def test_unusable_tls_file_is_named(tmp_path: Path):
    own = Authority(tmp_path).issue("localhost")
    for wrong, says in (
        (Tls(ca=tmp_path / "missing.pem"), r"^tls\.ca: \S*missing\.pem: No such file or directory: name a PEM file"),
        (Tls(ca=own.key), r"^tls\.ca: \S*localhost\.key: no certificate in PEM is there: name the file that has it$"),
        (Tls(ca=b"x"), r"^tls\.ca: the bytes given: no certificate in PEM"),
        (Tls(certificate=own.certificate, key=own.certificate), r"^tls\.key: \S*localhost\.pem: no private key"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            wrong.credentials()


class FailingTransport(Transport):
    """Attempts take so many seconds, at most their time limit, and fail; at last the silo does not answer."""

    def __init__(self, *attempts_s: float) -> None:
        self._attempts_s = [*attempts_s]

    @property
    def address(self) -> str:
        raise NotImplementedError

    def stream(self, method: str) -> StreamCall:
        raise NotImplementedError

    async def unary(self, method: str, request: bytes, *, timeout_s: float | None) -> bytes:
        assert timeout_s is not None
        if self._attempts_s and self._attempts_s[0] < timeout_s:
            await asyncio.sleep(self._attempts_s.pop(0))
            raise Unavailable("the server does not speak TLS")
        await asyncio.sleep(timeout_s)
        raise Unavailable("the silo did not answer in time")


@virtual_time
async def test_a_call_whose_last_attempt_is_cut_short_raises_the_reason_of_the_attempt_before():
    with pytest.raises(Unavailable, match="does not speak TLS"):
        await FailingTransport(6, 6).call("S/M", b"", timeout_s=10)
    for attempts in ((), (1,)):
        with pytest.raises(Unavailable, match="did not answer in time"):
            await FailingTransport(*attempts).call("S/M", b"", timeout_s=10)


FAILS = """
import asyncio, sys
from headrace import Client, Unavailable

async def main():
    address, says, *tls = sys.argv[1:]
    connect_timeout_s, error = 0.3, ""
    while says not in str(error):  # on a busy machine the first handshake may not end in time
        try:
            async with Client(address, tls=bool(tls), connect_timeout_s=connect_timeout_s):
                return
        except Unavailable as raised:
            connect_timeout_s, error = 2 * connect_timeout_s, raised
    print(error)

asyncio.run(main())
"""


def test_a_handshake_that_fails_writes_nothing(start: Start, tmp_path: Path):
    """Neither to the client's stderr, nor to the silo's log."""
    own = Authority(tmp_path).issue("localhost", "127.0.0.1")
    plain = start("silo", "--data", "plain", "--listen", "127.0.0.1:0")
    flags = ("--certificate", str(own.certificate), "--key", str(own.key))
    secured = start("silo", "--data", "secured", "--listen", "127.0.0.1:0", *flags)
    trials = ((plain, {"tls": "does not speak TLS"}), (secured, {"": "requires TLS", "tls": "is not trusted"}))
    for silo, attempts in trials:
        assert silo.stderr is not None
        while (ready := READY.search(silo.stderr.readline())) is None:
            pass
        for tls, says in attempts.items():
            command = [sys.executable, "-c", FAILS, ready[1].decode(), says, *tls.split()]
            done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
            assert says in done.stdout
            assert done.stderr == ""
        silo.terminate()
        assert "andshake" not in ended(silo).err


async def test_mutual_tls_shows_the_client_s_certificate(silos: Silos, tmp_path: Path):
    authority = Authority(tmp_path)
    own, client_s = authority.issue("localhost", "127.0.0.1"), authority.issue("client.example")
    flags = ("--certificate", str(own.certificate), "--key", str(own.key), "--client-ca", str(authority.certificate))
    silo = silos(*flags)
    with_certificate = Tls(ca=authority.certificate, certificate=client_s.certificate, key=client_s.key)
    async with Client(silo.address, tls=with_certificate) as client:
        await client.publish(S, b"")
    with pytest.raises(Unavailable, match=r"a client's certificate \(tls\.certificate\)$"):
        async with Client(silo.address, tls=Tls(ca=authority.certificate), connect_timeout_s=0.2):
            pass


async def test_before_it_is_open_nothing_is_sent(silo: SiloProcess):
    client = Client(silo.address, token="hr_x")
    for early in (client.publish(S, b""), client.subscriptions(), client.caught_up("s")):
        with pytest.raises(Closed, match="`async with`"):
            await early
    await client.aclose()


async def test_after_closing_every_call_says_closed(silo: SiloProcess):
    async with Client(silo.address) as client:
        pass
    with pytest.raises(Closed):
        await client.subscriptions()
    with pytest.raises(Closed):
        await client.publish(S, b"")
