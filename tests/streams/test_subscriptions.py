"""Selectors, starts, retry policies and definitions."""

import random
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace import InvalidArgument, RetryPolicy, Selector, SequenceToken, Start, StreamId, SubscriptionDefinition
from headrace.streams.subscriptions import Checkpoint, StartKind, StreamBehind

NAMES = st.text(st.sampled_from("ab*?[]!%/\n\\.^$ä"), max_size=6)


@pytest.mark.parametrize(
    ("pattern", "selected", "not_selected"),
    [
        ("a/*", [("a", ""), ("a", "1"), ("a", "b/c"), ("a", "x\ny")], [("", "a/1"), ("a2", "1"), ("A", "1")]),
        ("a/4?", [("a", "42"), ("a", "4ä"), ("a", "4\n"), ("a", "4%")], [("a", "4"), ("a", "422"), ("a", "14")]),
        ("*/eu-*", [("orders", "eu-1"), ("", "eu-"), ("a/b", "eu-1/2")], [("orders", "us-1"), ("a", "b/eu-1")]),
        ("team-?/x", [("team-a", "x"), ("team-/", "x")], [("team-ab", "x"), ("team-a", "y")]),
        ("a/b", [("a", "b")], [("a", "b/c"), ("a", "B"), ("", "a/b")]),
        ("a/b/*", [("a", "b/"), ("a", "b/c/d")], [("a", "b"), ("a/b", "c")]),
        ("a%2Fb/*", [("a/b", "c")], [("a", "b/c")]),
        ("n/%2A?", [("n", "*x"), ("n", "**")], [("n", "xx"), ("n", "*")]),
        ("n/*%3F", [("n", "why?"), ("n", "?")], [("n", "why")]),
        ("n/100%25*", [("n", "100%"), ("n", "100% sure")], [("n", "100")]),
        ("n/[ab]*", [("n", "[ab]c")], [("n", "a"), ("n", "b")]),
        ("*/*", [("", ""), ("a", "b"), ("a\n", "b/c")], []),
        ("/*", [("", "x")], [("a", "x")]),
    ],
)  # fmt: skip
def test_selector_selects(pattern: str, selected: list[tuple[str, str]], not_selected: list[tuple[str, str]]):
    matches = Selector(pattern).matcher()
    assert [name for name in selected if not matches(StreamId(*name))] == []
    assert [name for name in not_selected if matches(StreamId(*name))] == []


@given(NAMES, NAMES, NAMES, NAMES)
@example("n", "a*", "n", "ab")
@example("n?", "a", "nn", "a")
def test_the_text_form_of_a_stream_selects_that_stream_alone(namespace: str, key: str, other: str, other_key: str):
    stream = StreamId(namespace, key)
    selector = Selector(str(stream))
    assert selector.explicit
    assert selector.matcher()(stream)
    assert selector.matcher()(StreamId(other, other_key)) == (stream == StreamId(other, other_key))


def fits(pattern: str, text: str) -> bool:
    """What `*` and `?` mean, in the plainest words."""
    if not pattern:
        return not text
    if pattern[0] == "*":
        return fits(pattern[1:], text) or (text != "" and fits(pattern, text[1:]))
    return text != "" and pattern[0] in ("?", text[0]) and fits(pattern[1:], text[1:])


@given(
    st.text(st.sampled_from("ab*?[!"), max_size=5),
    st.text(st.sampled_from("ab*?[!/"), max_size=5),
    st.text(st.sampled_from("ab[!/"), max_size=4),
    st.text(st.sampled_from("ab[!/"), max_size=6),
)
def test_wildcards_select_streams_by_pattern(in_namespace: str, in_key: str, namespace: str, key: str):
    selected = Selector(f"{in_namespace}/{in_key}").matcher()(StreamId(namespace, key))
    assert selected == (fits(in_namespace, namespace) and fits(in_key, key))


def test_a_pattern_of_many_stars_is_quick():
    matches = Selector("n/" + "*a" * 40).matcher()
    assert not matches(StreamId("n", "a" * 39 + "b" * 900))


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("orders", "selects no stream: write namespace/key, or namespace/\\* for all keys"),
        ("*", "selects no stream"),
        ("n/50%*", "has a % that begins no escape"),
        ("n%/*", "has a % that begins no escape"),
        ("n/%FF?", "percent escapes that are not UTF-8"),
        ("n/" + "k" * 1025, "key has 1,025 bytes"),
    ],
)
def test_a_selector_that_cannot_be_is_refused_with_the_reason(pattern: str, why: str):
    with pytest.raises(InvalidArgument, match=why):
        Selector(pattern)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("earliest", Start.earliest()),
        ("latest", Start.latest()),
        ("1200", Start.at(SequenceToken(1200))),
        ("1200.7", Start.at(SequenceToken(1200, 7))),
        ("1970-01-01T00:00:01Z", Start(kind=StartKind.TIME, time_us=1_000_000)),
        ("2026-11-21T10:00:00+02:00", Start.since(datetime(2026, 11, 21, 8, tzinfo=UTC))),
    ],
)
def test_start_is_read_from_text(text: str, start: Start):
    assert Start.parse(text) == start


ZONES = st.integers(-23, 23).map(lambda hours: timezone(timedelta(hours=hours)))


@given(st.datetimes(timezones=ZONES))
def test_start_times_are_exact(when: datetime):
    start = Start.since(when)
    assert start.time_us is not None
    assert timedelta(microseconds=start.time_us) == when - datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not a start: use earliest, latest, a token such as 1200.7, or a time"),
        ("newest", "is not a start"),
        ("1.2.3", "is not a token"),
        ("2026-13-01", "is not a start"),
        ("2026-11-21T10:00:00", "has no time zone: add one"),
    ],
)
def test_text_that_is_no_start_is_refused_with_the_reason(text: str, why: str):
    with pytest.raises(InvalidArgument, match=why):
        Start.parse(text)


@pytest.mark.parametrize(
    ("kind", "token", "time_us"),
    [
        (StartKind.OFFSETS, None, None),
        (StartKind.TIME, None, None),
        (StartKind.EARLIEST, "1", None),
        (StartKind.OFFSETS, "1", 1),
        (StartKind.OFFSETS, "x", None),
    ],
)
def test_a_start_with_the_wrong_fields_is_refused(kind: StartKind, token: str | None, time_us: int | None):
    with pytest.raises(InvalidArgument):
        Start(kind=kind, token=token, time_us=time_us)


def definition(name: str = "a", selector: str = "n/*", start: Start | None = None) -> SubscriptionDefinition:
    return SubscriptionDefinition(name=name, selector=Selector(selector), start=start or Start.latest())


@pytest.mark.parametrize("name", ["a", "A.b_c-d", "0", "x" * 128])
def test_subscription_names_that_are_accepted(name: str):
    assert definition(name).name == name


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a/b", "ä", "a\n", "x" * 129])
def test_subscription_names_that_are_refused(name: str):
    with pytest.raises(InvalidArgument, match="is not a subscription name: letters, digits"):
        definition(name)


def test_only_a_subscription_to_one_stream_starts_at_a_token():
    at = Start.at(SequenceToken(5))
    assert definition(selector="n/k", start=at).start is at
    with pytest.raises(InvalidArgument, match=r"to one stream, not 'n/\*'; start it at a time instead"):
        definition(selector="n/*", start=at)


def test_definitions_survive_json():
    one = definition(start=Start.since(datetime(2026, 11, 21, tzinfo=UTC)))
    assert msgspec.json.decode(msgspec.json.encode(one), type=SubscriptionDefinition) == one


def test_a_definition_with_an_unknown_field_is_refused():
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.json.decode(
            b'{"name": "a", "selector": {"pattern": "n/*"}, "colour": "red"}', type=SubscriptionDefinition
        )


POLICIES = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 10**6),
    max_elapsed_s=st.floats(0, 1e9),
    initial_delay_s=st.floats(0, 1e6),
    max_delay_s=st.floats(0, 1e6),
    multiplier=st.floats(1, 1e6),
)


@given(POLICIES, st.integers(1, 10**6), st.floats(0, 1e9), st.randoms(use_true_random=False))
@example(RetryPolicy(max_attempts=10**6, max_elapsed_s=1e9), 10**5, 1.0, random.Random(1))
@example(RetryPolicy(max_attempts=10**6, initial_delay_s=0), 10**5, 1.0, random.Random(1))
def test_a_retry_waits_within_its_bounds_and_ends_at_either_limit(
    policy: RetryPolicy, attempts: int, elapsed_s: float, rng: random.Random
):
    delay = policy.delay(attempts, elapsed_s, rng)
    assert (delay is None) == (attempts >= policy.max_attempts or elapsed_s >= policy.max_elapsed_s)
    if delay is not None:
        assert 0 <= delay <= policy.max_delay_s


def test_delays_double_up_to_the_highest_and_are_scattered():
    policy = RetryPolicy(max_attempts=100, initial_delay_s=1, max_delay_s=10, multiplier=2)
    rng = random.Random(1)
    for attempts, ceiling in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (90, 10)):
        delays = [policy.delay(attempts, 0, rng) or 0 for _ in range(200)]
        assert ceiling / 2 <= min(delays) < max(delays) <= ceiling
        assert max(delays) - min(delays) > ceiling / 3


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_attempts": 0}, "retry.max_attempts is a whole number from 1 to 2,147,483,647, not 0"),
        ({"max_elapsed_s": -1.0}, "retry.max_elapsed_s is a number of seconds from 0 to 3,153,600,000, not -1.0"),
        ({"max_elapsed_s": float("inf")}, "retry.max_elapsed_s is a number"),
        ({"initial_delay_s": float("nan")}, "retry.initial_delay_s is a number"),
        ({"max_delay_s": -0.1}, "retry.max_delay_s is a number"),
        ({"multiplier": 0.5}, "retry.multiplier is a number from 1 to 1,000,000, not 0.5"),
        ({"multiplier": float("nan")}, "retry.multiplier is a number"),
    ],
)
def test_a_retry_policy_that_cannot_be_is_refused(options: dict[str, float], why: str):
    with pytest.raises(InvalidArgument, match=why):
        msgspec.structs.replace(RetryPolicy(), **options)


def test_a_checkpoint_needs_later_events_and_those_of_streams_behind():
    slow = StreamId("n", "slow")
    checkpoint = Checkpoint(100, {slow: StreamBehind(SequenceToken(40, 2))})
    assert checkpoint.watermark == 40
    assert [offset for offset in (39, 40, 99, 100) if checkpoint.wants(slow, offset)] == [40, 99, 100]
    assert [offset for offset in (39, 40, 99, 100) if checkpoint.wants(StreamId("n", "k"), offset)] == [100]
    assert Checkpoint(100).watermark == 100
