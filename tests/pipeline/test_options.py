"""The source's options: valid ones are read, and an error names the option that is wrong."""

import pytest

from headrace.pipeline.options import OffsetPositions, SourceOptions, TimePosition, TokenPosition, source_options
from headrace.streams.errors import InvalidArgument


def options(**given: str) -> SourceOptions:
    return source_options({"data": "d", **given})


def test_without_options_everything_is_read_from_the_earliest_on():
    found = options()
    assert found.selector.pattern == "*/*"
    assert (found.start, found.end) == ("earliest", "latest")
    assert tuple(found.columns) == (
        "namespace",
        "key",
        "payload",
        "headers",
        "id",
        "timestamp",
        "queue",
        "offset",
        "index",
    )
    assert found.fail_on_data_loss
    assert (found.max_events, found.max_bytes, found.events_per_partition) == (None, None, None)


def test_options_are_read_in_any_case():
    found = options(NAMESPACE="orders", Key="a*", MAXEVENTSPERTRIGGER="5", failondataloss="False", columns="key, id")
    assert found.selector.pattern == "orders/a*"
    assert found.max_events == 5
    assert not found.fail_on_data_loss
    assert found.columns == ["key", "id"]


def test_options_of_spark_itself_are_ignored():
    assert options(queryName="q", checkpointLocation="c", path="p") == options()


def test_positions():
    assert options(start="1970-01-01T00:00:01+00:00").start == TimePosition(1_000_000)
    assert options(start='{"1": 12}').start == OffsetPositions({1: 12})
    assert options(namespace="n", key="k", start="12").start == TokenPosition(12)


def test_positions_may_have_the_names_of_sparks_kafka_source():
    assert options(startingOffsets="latest", endingOffsets='{"1": -1}').start == "latest"
    assert options(startingOffsets='{"0": -2, "1": 7}').start == OffsetPositions({0: -2, 1: 7})
    assert options(startingTimestamp="1500", endingTimestamp="2000")[1:3] == (
        TimePosition(1_500_000),
        TimePosition(2_000_000),
    )


def test_a_micro_batch_may_wait_for_events():
    assert options(minEventsPerTrigger="10").max_delay_s == 900
    found = options(minEventsPerTrigger="10", maxTriggerDelay="1500ms")
    assert (found.min_events, found.max_delay_s) == (10, 1.5)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"colums": "key"}, "option 'colums' is unknown: there are data"),
        ({"maxOffsetsPerTrigger": "5"}, "'maxOffsetsPerTrigger' belongs to Spark's Kafka source: here it is maxEvents"),
        ({"start": "latest", "startingTimestamp": "1"}, "options 'start' and 'startingTimestamp' both give a position"),
        ({"startingTimestamp": "2026-01-01"}, "option 'startingTimestamp' is a time in milliseconds"),
        ({"startingOffsets": "12"}, "option 'startingOffsets' is earliest, latest or"),
        ({"start": '{"0": -3}'}, "option 'start': expected the offset of each queue"),
        ({"maxTriggerDelay": "5s"}, "option 'maxTriggerDelay' needs the option 'minEventsPerTrigger'"),
        ({"minEventsPerTrigger": "5", "maxTriggerDelay": "5"}, "option 'maxTriggerDelay' is a duration such as 500ms"),
        ({"columns": "key,nothing"}, "option 'columns': there is no column 'nothing'"),
        ({"columns": "key,key"}, "option 'columns' names one twice"),
        ({"namespace": "a/b"}, "option 'namespace' has a slash"),
        ({"namespace": "a%zz", "key": "k"}, "option 'namespace' or 'key'"),
        ({"start": "yesterday"}, "option 'start' is earliest, latest"),
        ({"start": "2026-01-01T00:00:00"}, "option 'start': the time '2026-01-01T00:00:00' has no zone"),
        ({"start": "12"}, "option 'start': a token such as '12' belongs to one stream"),
        ({"namespace": "n", "key": "k", "start": "12.3"}, "option 'start': reading begins with a batch: write 12"),
        ({"start": "{1: 2}"}, "option 'start': expected the offset of each queue"),
        ({"start": '{"0":' + "[" * 100_000}, "option 'start': expected the offset of each queue"),
        ({"start": '{"1": "2"}'}, "option 'start': expected the offset of each queue"),
        ({"end": "soon"}, "option 'end' is earliest"),
        ({"maxEventsPerTrigger": "0"}, "option 'maxEventsPerTrigger' is a number from 1 on, not '0'"),
        ({"maxBytesPerTrigger": "1k"}, "option 'maxBytesPerTrigger' is a number"),
        ({"failOnDataLoss": "no"}, "option 'failOnDataLoss' is true or false, not 'no'"),
    ],
)
def test_mistake_is_named(given: dict[str, str], told: str):
    with pytest.raises(InvalidArgument) as caught:
        options(**given)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
