"""The check of `payloadSchema`: it accepts and refuses the same schemas as Spark, and an error names the place."""

import pytest

from headrace.pipeline.ddl import check_fields
from headrace.streams.errors import InvalidArgument


@pytest.mark.parametrize(
    "ddl",
    [
        "a INT",
        "a: int, `b c` decimal(10, 2) NOT NULL COMMENT 'it\\'s', d string",
        'a array<struct<x: map<string, array<double>>, y timestamp_ntz>> COMMENT "text"',
    ],
)
def test_fields_of_sparks_language_pass(ddl: str):
    check_fields("payloadSchema", ddl)


@pytest.mark.parametrize(
    ("ddl", "expected"),
    [
        ("", "the name of a field, found the end"),
        ("a", "a type such as STRING, INT, DOUBLE or ARRAY<STRING>, found the end of 'a'"),
        ("a INTT", "found 'INTT' at position 3 of 'a INTT'"),
        ("a INT b INT", "',' and another field, found 'b' at position 7"),
        ("a ARRAY<INT", "'>', found the end"),
        ("a STRUCT<b INT", "',' and another field, or '>', found the end"),
        ("a DECIMAL(x)", "a number, found 'x'"),
        ("a MAP<STRING>", "',' between the types of MAP, found '>'"),
    ],
)
def test_the_first_mistake_is_named_with_its_place(ddl: str, expected: str):
    with pytest.raises(InvalidArgument) as caught:
        check_fields("payloadSchema", ddl)
    assert str(caught.value).startswith("option 'payloadSchema': expected ")
    assert expected in str(caught.value)
