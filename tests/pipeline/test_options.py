"""The source's options: what is right is read, and what is wrong is named."""

import pytest

from headrace.pipeline.options import At, Offsets, SourceOptions, Token, source_options
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


def test_what_spark_itself_passes_on_is_no_option():
    assert options(queryName="q", checkpointLocation="c", path="p") == options()


def test_positions():
    assert options(start="1970-01-01T00:00:01+00:00").start == At(1_000_000)
    assert options(start='{"1": 12}').start == Offsets({1: 12})
    assert options(namespace="n", key="k", start="12").start == Token(12)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"colums": "key"}, "option 'colums' is unknown: there are data"),
        ({"columns": "key,nothing"}, "option 'columns': there is no column 'nothing'"),
        ({"columns": "key,key"}, "option 'columns' names one twice"),
        ({"namespace": "a/b"}, "option 'namespace' has a slash"),
        ({"namespace": "a%zz", "key": "k"}, "option 'namespace' or 'key'"),
        ({"start": "yesterday"}, "option 'start' is earliest, latest"),
        ({"start": "2026-01-01T00:00:00"}, "option 'start': the time '2026-01-01T00:00:00' has no zone"),
        ({"start": "12"}, "option 'start': a token such as '12' belongs to one stream"),
        ({"namespace": "n", "key": "k", "start": "12.3"}, "option 'start': reading begins with a batch: write 12"),
        ({"start": "{1: 2}"}, "option 'start' has offsets as"),
        ({"start": '{"1": "2"}'}, "option 'start' has offsets as"),
        ({"start": '{"1": -2}'}, "option 'start' has offsets as"),
        ({"end": "soon"}, "option 'end' is earliest"),
        ({"maxEventsPerTrigger": "0"}, "option 'maxEventsPerTrigger' is a number from 1 on, not '0'"),
        ({"maxBytesPerTrigger": "1k"}, "option 'maxBytesPerTrigger' is a number"),
        ({"failOnDataLoss": "no"}, "option 'failOnDataLoss' is true or false, not 'no'"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, str], told: str):
    with pytest.raises(InvalidArgument) as caught:
        options(**given)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
