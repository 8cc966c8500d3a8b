"""Limits of each client: counting, refusals and their messages, and the clients that are forgotten."""

import re
import tracemalloc
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import InvalidArgument, LimitExceeded
from headrace.server.access import EVERYTHING, Permission, Principal
from headrace.server.limits import MAX_IDLE, CallUsage, ClientLimiter, ClientLimits, address_of, client_of
from tests.random_examples import examples


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limits(clock: Clock, **options: Any) -> ClientLimiter:
    return ClientLimiter(ClientLimits(**options), clock)


def refusal(limits: ClientLimiter, client: str = "a", peer: str = "p") -> str:
    with pytest.raises(LimitExceeded) as caught:
        limits.begin(client, peer)
    assert caught.value.retryable
    return str(caught.value)


# The client that a call is counted for


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:50312", "10.0.0.7"),
        ("ipv6:%5B::1%5D:50312", "::1"),
        ("ipv6:[2001:DB8:0:0::7]:1", "2001:db8::7"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:1", "10.0.0.7"),
        ("ipv4:10.0.0:1", "ipv4:10.0.0:1"),
        ("unix:", "unix:"),
        ("unix:/run/x:1", "unix:/run/x:1"),
        ("", ""),
    ],
)
def test_an_address_is_the_peer_s_without_its_port(peer: str, address: str):
    assert address_of(peer) == address


def test_named_caller_is_counted_by_its_name_from_any_address():
    principal = Principal.of("orders", {Permission.PUBLISH: ["*"]})
    assert client_of(principal, "ipv4:10.0.0.7:1") == client_of(principal, "ipv4:10.0.0.8:1") == "client 'orders'"


def test_caller_without_a_name_is_counted_by_its_address():
    assert client_of(EVERYTHING, "ipv4:10.0.0.7:1") == client_of(None, "ipv4:10.0.0.7:2") == "address 10.0.0.7"


def test_a_name_that_looks_like_an_address_is_another_client():
    assert client_of(Principal("10.0.0.7", {}), "") != client_of(None, "ipv4:10.0.0.7:1")


# Calls and connections


def test_concurrent_calls_are_bounded(clock: Clock):
    gate = limits(clock, calls=2)
    first, second = gate.begin("client 'a'", "p"), gate.begin("client 'a'", "p")
    assert refusal(gate, "client 'a'") == (
        "client 'a': 2 calls are open, and the limit (calls) is 2: end some first, or have grpc.limits.calls raised"
    )
    first.end()
    gate.begin("client 'a'", "p").end()
    second.end()


def test_connections_with_calls_are_bounded(clock: Clock):
    gate = limits(clock, connections=2)
    first = [gate.begin("a", "p") for _ in range(3)]
    gate.begin("a", "q")
    assert refusal(gate, peer="r") == (
        "a: 2 connections are open, and the limit (connections) is 2: make more calls on each of them, or have "
        "grpc.limits.connections raised"
    )
    gate.begin("a", "q")  # on one that is open
    for call in first[:-1]:
        call.end()
    refusal(gate, peer="r")
    first[-1].end()
    gate.begin("a", "r")


def test_one_client_at_its_limits_disturbs_no_other(clock: Clock):
    gate = limits(clock, calls=1, requests_per_s=1, burst=1, publish_bytes=10, message_bytes=10)
    call = gate.begin("a", "p")
    call.hold(10)
    refusal(gate)
    with gate.begin("b", "p") as other:
        other.hold(10)


def test_the_end_of_a_call_counts_once(clock: Clock):
    gate = limits(clock, calls=2)
    first, second = gate.begin("a", "p"), gate.begin("a", "p")
    first.end()
    first.end()
    assert gate.usage().calls == 1
    second.end()


def test_a_call_ends_with_its_block(clock: Clock):
    gate = limits(clock, calls=1)
    with pytest.raises(ZeroDivisionError), gate.begin("a", "p"):
        raise ZeroDivisionError
    assert gate.usage().calls == 0


def test_refused_call_has_not_begun(clock: Clock):
    gate = limits(clock, calls=1, burst=2, requests_per_s=1)
    call = gate.begin("a", "p")
    for _ in range(5):
        refusal(gate)  # takes no request
    call.end()
    gate.begin("a", "p").end()
    assert "requests_per_s" in refusal(gate)
    assert gate.usage()[1:] == (0, 0, 0, {"calls": 5, "requests_per_s": 1})


# Requests


def test_requests_come_in_a_burst_and_then_at_the_rate(clock: Clock):
    gate = limits(clock, requests_per_s=10, burst=5)
    for _ in range(5):
        gate.begin("a", "p").end()
    assert refusal(gate) == (
        "a: too many requests arrived, and the limit (requests_per_s) is 10: wait, and put more into each request, or "
        "have grpc.limits.requests_per_s raised"
    )
    clock.now += 0.25
    gate.begin("a", "p").end()
    gate.begin("a", "p").end()
    refusal(gate)


def test_messages_on_a_stream_are_requests(clock: Clock):
    gate = limits(clock, requests_per_s=1, burst=3)
    call = gate.begin("a", "p")
    call.request()
    call.request()
    with pytest.raises(LimitExceeded, match="requests_per_s"):
        call.request()
    clock.now += 1
    call.request()


def test_a_pause_saves_up_no_more_than_a_burst(clock: Clock):
    gate = limits(clock, requests_per_s=10, burst=3)
    call = gate.begin("a", "p")
    clock.now += 1e9
    for _ in range(3):
        call.request()
    with pytest.raises(LimitExceeded):
        call.request()


# Bytes


def test_bytes_being_published_are_bounded(clock: Clock):
    gate = limits(clock, publish_bytes=2000, message_bytes=1)
    one, other = gate.begin("a", "p"), gate.begin("a", "q")
    one.hold(1500)
    with pytest.raises(LimitExceeded) as caught:
        other.hold(501)
    assert str(caught.value) == (
        "a: 1,500 bytes are being published, and 501 more arrived, and the limit (publish_bytes) is 2,000: wait for "
        "answers before sending more, or have grpc.limits.publish_bytes raised"
    )
    other.hold(500)
    one.release(1)
    other.hold(1)


def test_a_call_releases_what_it_held_when_it_ends(clock: Clock):
    gate = limits(clock, publish_bytes=10, message_bytes=1)
    other = gate.begin("a", "p")
    other.hold(1)
    with gate.begin("a", "p") as call:
        call.hold(4)
        call.hold(5)
        call.release(4)
        assert gate.usage().publish_bytes == 6
    assert gate.usage().publish_bytes == 1
    other.end()
    assert gate.usage().publish_bytes == 0


# Limits that make no sense


def test_a_limit_of_publish_bytes_below_a_message_is_refused():
    with pytest.raises(InvalidArgument, match=re.escape("publish_bytes is 9, below message_bytes (10)")):
        ClientLimits(publish_bytes=9, message_bytes=10)


def test_the_limits_hold_a_largest_event_as_they_are():
    assert ClientLimits().message_bytes > 4 << 20


# Memory


def test_an_idle_client_is_forgotten_when_it_would_be_treated_like_a_new_one(clock: Clock):
    gate = limits(clock, requests_per_s=1, burst=10)
    for _ in range(4):
        gate.begin("a", "p").end()
    clock.now += 3.9
    with gate.begin("b", "p"):
        assert gate.usage().clients == 2
    clock.now += 1.0
    with gate.begin("c", "p"):
        assert gate.usage().clients == 1  # b is forgotten, too


def test_a_client_with_a_call_is_never_forgotten(clock: Clock):
    gate = limits(clock, calls=1)
    call = gate.begin("a", "p")
    clock.now += 1e9
    gate.begin("b", "p").end()
    refusal(gate)
    call.end()


@pytest.mark.long
def test_a_flood_of_addresses_takes_bounded_memory(clock: Clock):
    gate = limits(clock, requests_per_s=0.001, burst=2)
    for number in range(3 * MAX_IDLE):
        gate.begin(f"address {number}", f"peer {number}").end()
    assert gate.usage().clients == MAX_IDLE
    tracemalloc.start()
    try:
        for number in range(3 * MAX_IDLE, 6 * MAX_IDLE):
            gate.begin(f"address {number}", f"peer {number}").end()
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert gate.usage().clients == MAX_IDLE
    assert grown < MAX_IDLE * 1500  # those that came take the place of those that went


def test_a_flood_that_is_refused_is_forgotten_too(clock: Clock):
    gate = limits(clock, requests_per_s=1, burst=1)
    for number in range(100):
        gate.begin(f"address {number}", "p").end()
        refusal(gate, f"address {number}")
    clock.now += 1.0
    with gate.begin("a", "p"):
        assert gate.usage().clients == 1


# Against a simple model, which forgets no client.


class Model:
    """The limits in the plainest words."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        self.open: list[tuple[str, str]] = []
        self.left: dict[str, float] = {}
        self.held: dict[str, int] = {}

    def pass_time(self, seconds: float) -> None:
        for client in self.left:
            self.left[client] = min(self.left[client] + seconds * self.limits.requests_per_s, self.limits.burst)

    def begin(self, client: str, peer: str) -> str | None:
        calls = [of for of in self.open if of[0] == client]
        if len(calls) >= self.limits.calls:
            return "calls"
        if len({peer, *(at for _, at in calls)}) > self.limits.connections:
            return "connections"
        if refused := self.request(client):
            return refused
        self.open.append((client, peer))
        return None

    def request(self, client: str) -> str | None:
        if self.left.setdefault(client, self.limits.burst) < 1:
            return "requests_per_s"
        self.left[client] -= 1
        return None

    def hold(self, client: str, nbytes: int) -> str | None:
        held = self.held.get(client, 0)
        if held + nbytes > self.limits.publish_bytes:
            return "publish_bytes"
        self.held[client] = held + nbytes
        return None


def outcome(step: Any, *arguments: Any) -> tuple[str | None, Any]:
    """Return the limit that refused the step, and the step's result."""
    try:
        return None, step(*arguments)
    except LimitExceeded as error:
        found = re.search(r"the limit \((\w+)\)", str(error))
        assert found
        return found[1], None


steps = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from("ab"), st.sampled_from("pqr")),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("request"), st.integers(0, 5)),
    st.tuples(st.just("hold"), st.integers(0, 5), st.integers(1, 6)),
    st.tuples(st.just("wait"), st.sampled_from([0.25, 0.5, 4.0])),
)


class Begun(NamedTuple):
    call: CallUsage
    client: str
    peer: str
    held: list[int]


@given(st.lists(steps, max_size=60))
@settings(max_examples=examples(300))
def test_forgetting_is_never_noticed(script: list[tuple[Any, ...]]):
    rules = ClientLimits(
        connections=2, calls=3, requests_per_s=2.0, burst=4, publish_bytes=10, message_bytes=10
    )  # powers of two, so that the model's sums are exact
    clock = Clock()
    gate, model = ClientLimiter(rules, clock), Model(rules)
    calls: list[Begun] = []
    for kind, *arguments in script:
        if kind == "begin":
            refused, call = outcome(gate.begin, *arguments)
            assert refused == model.begin(*arguments)
            if call:
                calls.append(Begun(call, *arguments, held=[]))
        elif kind == "wait":
            clock.now += arguments[0]
            model.pass_time(arguments[0])
        elif arguments[0] < len(calls):
            call, client, peer, held = calls[int(arguments[0])]
            if kind == "request":
                assert outcome(call.request)[0] == model.request(client)
            elif kind == "hold":
                refused = model.hold(client, arguments[1])
                assert outcome(call.hold, arguments[1])[0] == refused
                held.extend([] if refused else [arguments[1]])
            else:
                calls.pop(arguments[0]).call.end()
                model.open.remove((client, peer))
                model.held[client] = model.held.get(client, 0) - sum(held)
    usage = gate.usage()
    assert (usage.calls, usage.publish_bytes) == (len(model.open), sum(model.held.values()))
    assert usage.connections == len(set(model.open))
