"""Access to a silo over gRPC: tokens, TLS and certificates, tried on real processes."""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from headrace.proto.v1 import consumer_pb2, events_pb2, publisher_pb2, subscriptions_pb2
from tests.certificates import Authority
from tests.cli.commandline import Headrace, Start, ended
from tests.cli.forking import Process

READY = re.compile(rb"silo is ready: .*; gRPC on (\S+)")


class Answered(NamedTuple):
    """How a call ended: the name of its status, headrace's code, and the text."""

    status: str
    code: str = ""
    details: str = ""


class Caller:
    """A client that knows no more than the protocol."""

    def __init__(self, channel: grpc.Channel, token: str | None = None) -> None:
        self._channel: Any = channel
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def publish(self, namespace: str, key: str = "k", payload: bytes = b"x") -> Answered:
        batch = events_pb2.EventBatch(namespace=namespace, key=key, sizes=[len(payload)], payload=payload)
        return self._ask("PublisherService/Publish", publisher_pb2.PublishRequest(batches=[batch]))

    def pull(self, subscription: str) -> Answered:
        request = consumer_pb2.PullRequest(subscription=subscription, consumer="c", wait_ms=1)
        return self._ask("ConsumerService/Pull", request)

    def subscribe(self, selector: str, name: str = "s", until: threading.Event | None = None) -> Answered:
        """Consume, with a heartbeat now and then, until the silo ends the call or `until` says so."""
        done = threading.Event()
        definition = subscriptions_pb2.SubscriptionDefinition(name=name, selector=selector)

        def requests() -> Iterator[bytes]:
            yield consumer_pb2.SubscribeRequest(open=consumer_pb2.Open(definition=definition)).SerializeToString()
            while not done.wait(0.05):
                closing = until is not None and until.is_set()
                yield consumer_pb2.SubscribeRequest(close=closing).SerializeToString()
                if closing:
                    return

        call = self._channel.stream_stream("/headrace.v1.ConsumerService/Subscribe")
        try:
            for _ in call(requests(), metadata=self._metadata, timeout=60):
                pass
        except grpc.RpcError as error:
            return answered(error)
        finally:
            done.set()
        return Answered("OK")

    def _ask(self, method: str, request: Any) -> Answered:
        call = self._channel.unary_unary(f"/headrace.v1.{method}")
        try:
            call(request.SerializeToString(), metadata=self._metadata, timeout=60)
        except grpc.RpcError as error:
            return answered(error)
        return Answered("OK")


def answered(error: Any) -> Answered:
    trailers: dict[str, str] = dict(error.trailing_metadata() or ())
    return Answered(error.code().name, trailers.get("headrace-code", ""), error.details())


Serve = Callable[..., str]
Connect = Callable[..., Caller]


@pytest.fixture
def serve(start: Start) -> Serve:
    """Start a silo on the data directory d with these flags; gives the port."""

    def begin(*flags: object) -> str:
        process = start("silo", "--data", "d", *flags)
        assert process.stderr is not None
        for line in process.stderr:
            if match := READY.search(line):
                threading.Thread(target=drain, args=(process,), daemon=True).start()
                return match[1].decode().rpartition(":")[2]
        raise AssertionError(ended(process))

    return begin


def drain(process: Process) -> None:
    assert process.stderr is not None
    for _ in process.stderr:
        pass


@pytest.fixture
def connect() -> Iterator[Connect]:
    channels: list[grpc.Channel] = []

    def to(port: str, token: str | None = None, credentials: grpc.ChannelCredentials | None = None) -> Caller:
        address = f"localhost:{port}"
        options = [("grpc.enable_retries", 0)]
        channels.append(
            grpc.insecure_channel(address, options)
            if credentials is None
            else grpc.secure_channel(address, credentials, options)
        )
        return Caller(channels[-1], token)

    yield to
    for channel in channels:
        channel.close()


def token(headrace: Headrace, name: str, *flags: str) -> str:
    made = headrace("tokens", "create", name, "--data", "d", *flags)
    assert made.code == 0, made
    return made.out.strip()


def trusting(authority: Authority, *names: str) -> grpc.ChannelCredentials:
    """Return TLS credentials that trust silos of the authority, with its certificate for `names` if there are any."""
    certificate = authority.certificate.read_bytes()
    if not names:
        return grpc.ssl_channel_credentials(certificate)
    own = authority.issue(*names)
    return grpc.ssl_channel_credentials(certificate, own.key.read_bytes(), own.certificate.read_bytes())


# Tokens


def test_a_token_allows_only_its_permissions(headrace: Headrace, serve: Serve, connect: Connect):
    orders = token(headrace, "orders", "--publish", "orders*")
    reader = token(headrace, "reader", "--subscribe", "orders*")
    port = serve("--listen", "127.0.0.1:0", "--auth", "tokens")

    assert connect(port, orders).publish("orders-eu") == Answered("OK")
    assert connect(port, orders).publish("secret").status == "PERMISSION_DENIED"
    assert connect(port, reader).publish("orders-eu").status == "PERMISSION_DENIED"
    assert connect(port, orders).subscribe("orders/*").status == "PERMISSION_DENIED"
    assert connect(port, reader).subscribe("*/*").status == "PERMISSION_DENIED"
    stop = threading.Event()
    stop.set()
    assert connect(port, reader).subscribe("orders*/*", until=stop) == Answered("OK")


def test_without_a_token_or_with_a_wrong_one_nothing_is_allowed(headrace: Headrace, serve: Serve, connect: Connect):
    right = token(headrace, "orders", "--publish", "*", "--subscribe", "*")
    port = serve("--listen", "127.0.0.1:0", "--auth", "tokens")

    for wrong in (None, "hr_" + "A" * 43, right[:-1], ""):
        caller = connect(port, wrong)
        for refused in (caller.publish("orders"), caller.pull("s"), caller.subscribe("orders/*")):
            assert (refused.status, refused.code) == ("UNAUTHENTICATED", "unauthenticated")
            assert "`headrace tokens create`" in refused.details or "Bearer hr_..." in refused.details
            assert right not in refused.details
    assert connect(port, right).publish("orders") == Answered("OK")


def test_existing_and_missing_names_are_refused_alike(headrace: Headrace, serve: Serve, connect: Connect):
    everything = token(headrace, "everything", "--publish", "*", "--subscribe", "*")
    limited = token(headrace, "limited", "--publish", "mine", "--subscribe", "mine")
    port = serve("--listen", "127.0.0.1:0", "--auth", "tokens")
    assert connect(port, everything).publish("secret", "there", b"x" * 1000) == Answered("OK")
    stop = threading.Event()
    stop.set()
    assert connect(port, everything).subscribe("secret/*", "there", until=stop) == Answered("OK")

    caller = connect(port, limited)
    for there, missing in (
        (caller.pull("there"), caller.pull("other")),
        (caller.publish("secret", "there"), caller.publish("secret", "other")),
        (caller.subscribe("secret/there", "x"), caller.subscribe("secret/other", "x")),
    ):
        assert there.status == "PERMISSION_DENIED"
        assert there == missing._replace(details=missing.details.replace("other", "there"))
    # To take the name of a subscription that it may not know of tells it no more than that.
    taken = caller.subscribe("mine/*", "there")
    assert taken.status == "PERMISSION_DENIED"
    assert "secret" not in taken.details


@pytest.mark.long
def test_a_token_counts_and_a_revoked_one_ends_while_the_silo_runs(headrace: Headrace, serve: Serve, connect: Connect):
    port = serve("--listen", "127.0.0.1:0", "--auth", "tokens")
    caller = connect(port, token(headrace, "orders", "--publish", "*", "--subscribe", "*"))
    while (first := caller.publish("orders")).status != "OK":
        assert first.status == "UNAUTHENTICATED"  # until it looks for tokens again

    ends: list[Answered] = []
    consuming = threading.Thread(target=lambda: ends.append(caller.subscribe("orders/*")))
    consuming.start()
    assert headrace("tokens", "revoke", "orders", "--data", "d").code == 0
    consuming.join()
    assert ends[0].status == "UNAUTHENTICATED"
    assert caller.publish("orders").status == "UNAUTHENTICATED"


# TLS


def test_tls_serves_clients_that_trust_the_silo(tmp_path: Path, headrace: Headrace, serve: Serve, connect: Connect):
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    own = authority.issue("localhost")
    port = serve("--listen", "127.0.0.1:0", "--certificate", own.certificate, "--key", own.key)

    assert connect(port, credentials=trusting(authority)).publish("orders") == Answered("OK")
    assert connect(port, credentials=trusting(stranger)).publish("orders").status == "UNAVAILABLE"
    assert connect(port).publish("orders").status == "UNAVAILABLE"


def test_with_certificates_of_clients_only_those_are_served(
    tmp_path: Path, headrace: Headrace, serve: Serve, connect: Connect
):
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    own, certificate = authority.issue("localhost"), authority.certificate
    flags = ("--certificate", own.certificate, "--key", own.key, "--client-ca", certificate)
    port = serve("--listen", "0.0.0.0:0", *flags)

    assert connect(port, credentials=trusting(authority, "client.example.org")).publish("orders") == Answered("OK")
    assert connect(port, credentials=trusting(authority)).publish("orders").status == "UNAVAILABLE"
    foreign = stranger.issue("client.example.org")
    forged = grpc.ssl_channel_credentials(
        certificate.read_bytes(), foreign.key.read_bytes(), foreign.certificate.read_bytes()
    )
    assert connect(port, credentials=forged).publish("orders").status == "UNAVAILABLE"


def test_silo_that_others_can_reach_asks_for_tokens(tmp_path: Path, headrace: Headrace, serve: Serve, connect: Connect):
    authority = Authority(tmp_path)
    own = authority.issue("localhost")
    right = token(headrace, "orders", "--publish", "*")
    port = serve("--listen", "0.0.0.0:0", "--certificate", own.certificate, "--key", own.key)

    assert connect(port, credentials=trusting(authority)).publish("orders").status == "UNAUTHENTICATED"
    assert connect(port, right, trusting(authority)).publish("orders") == Answered("OK")
