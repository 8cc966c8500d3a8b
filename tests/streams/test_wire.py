"""Records become messages of the protocol and are the same again; what no record can hold is told by its field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import (
    DeadLetter,
    GapRecord,
    InvalidArgument,
    Mode,
    OnFailure,
    RetryPolicy,
    Selector,
    SequenceToken,
    SlowConsumer,
    Start,
    StreamId,
    SubscriptionDefinition,
)
from headrace.proto.v1 import subscriptions_pb2 as pb
from headrace.streams.field_limits import MAX_ATTEMPTS, MAX_TIME_US, MIN_TIME_US
from headrace.streams.subscriptions import StartKind
from headrace.streams.wire import (
    dead_letter_message,
    dead_letter_of,
    definition_message,
    definition_of,
    gap_message,
    gap_of,
    start_message,
    start_of,
)

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
SECONDS = st.floats(0, 1e6)
TIMES = st.integers(MIN_TIME_US, MAX_TIME_US)
STREAMS = st.builds(StreamId, TEXT, TEXT)
TOKENS = st.builds(SequenceToken, st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 32) - 1))
STARTS = st.one_of(
    st.sampled_from([Start.earliest(), Start.latest()]),
    st.builds(Start, kind=st.just(StartKind.TIME), time_us=TIMES),
    st.builds(Start.at, TOKENS),
)
RETRIES = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, MAX_ATTEMPTS),
    max_elapsed_s=SECONDS,
    initial_delay_s=SECONDS,
    max_delay_s=SECONDS,
    multiplier=st.floats(1, 1e6),
)
DEFINITIONS = st.builds(
    SubscriptionDefinition,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    selector=STREAMS.map(lambda stream: Selector(str(stream))),
    start=STARTS,
    retry=RETRIES,
    on_failure=st.sampled_from(OnFailure),
    slow_consumer=st.sampled_from([None, *SlowConsumer]),
    filter=st.none() | st.just("shop:large"),
    mode=st.sampled_from(Mode),
)
LETTERS = st.builds(
    DeadLetter,
    id=st.integers(0, (1 << 63) - 1),
    provider=st.just("default"),
    subscription=st.just("printer"),
    queue=st.integers(0, 1000),
    stream=STREAMS,
    token=TOKENS,
    payload=st.binary(max_size=30),
    headers=st.dictionaries(TEXT, TEXT, max_size=3),
    event_id=st.none() | TEXT.filter(bool),
    timestamp_us=TIMES,
    reason=TEXT,
    attempts=st.integers(0, 1000),
    failed_at_us=TIMES,
    redrive=st.booleans(),
)
GAPS = st.builds(
    GapRecord,
    provider=st.just("default"),
    subscription=st.just("printer"),
    queue=st.integers(0, 1000),
    stream=st.none() | STREAMS,
    low=TOKENS,
    high=TOKENS,
    reason=TEXT,
    at_us=TIMES,
)


@given(DEFINITIONS)
def test_a_definition_survives_the_wire(definition: SubscriptionDefinition):
    encoded = definition_message(definition).SerializeToString()
    assert definition_of(pb.SubscriptionDefinition.FromString(encoded)) == definition


@given(STARTS)
def test_a_start_survives_the_wire(start: Start):
    assert start_of(pb.Start.FromString(start_message(start).SerializeToString())) == start


@given(LETTERS)
def test_a_dead_letter_survives_the_wire(letter: DeadLetter):
    encoded = dead_letter_message(letter).SerializeToString()
    assert dead_letter_of(pb.DeadLetter.FromString(encoded), "default") == letter


@given(GAPS)
def test_a_gap_survives_the_wire(gap: GapRecord):
    assert gap_of(pb.Gap.FromString(gap_message(gap).SerializeToString()), "default", "printer") == gap


def test_field_left_out_has_its_default():
    message = pb.SubscriptionDefinition(name="printer", selector="shop/*")
    assert definition_of(message) == SubscriptionDefinition(name="printer", selector=Selector("shop/*"))


def test_fields_that_a_retry_policy_does_not_give_have_their_defaults():
    message = pb.SubscriptionDefinition(name="printer", selector="shop/*", retry=pb.RetryPolicy(max_elapsed_s=0))
    assert definition_of(message).retry == RetryPolicy(max_elapsed_s=0)


def bad(**fields: object) -> pb.SubscriptionDefinition:
    return pb.SubscriptionDefinition(**{"name": "printer", "selector": "shop/*", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (bad(selector="shop"), "definition.selector: 'shop' selects no stream"),
        (bad(selector="shop/" + "*" * 8192), "definition.selector: a selector has at most 8,192 characters, not 8,197"),
        (bad(name="../x"), "definition: '../x' is not a subscription name"),
        (bad(mode=7), "definition.mode: 7 is none of the known values 0, 1, 2, 3"),
        (bad(on_failure=-1), "definition.on_failure: -1 is none"),
        (bad(slow_consumer=99), "definition.slow_consumer: 99 is none"),
        (bad(retry=pb.RetryPolicy(max_attempts=0)), "definition.retry: retry.max_attempts is a whole number from 1 to"),
        (
            bad(retry=pb.RetryPolicy(max_delay_s=float("nan"))),
            "definition.retry: retry.max_delay_s is a number",
        ),
        (bad(start=pb.Start(token="soon")), "definition.start.token: 'soon' is not a token"),
        (bad(start=pb.Start(token="7")), "definition: subscription 'printer': a token is a position in one queue"),
        (bad(start=pb.Start(earliest=False)), "definition.start.earliest is true or left out"),
    ],
)
def test_impossible_definition_is_refused_with_its_field(message: pb.SubscriptionDefinition, text: str):
    with pytest.raises(InvalidArgument) as caught:
        definition_of(message)
    assert str(caught.value).startswith(text)
