from __future__ import annotations

import pickle

import pytest

from headrace.streams.errors import (
    CorruptRecord,
    HeadraceError,
    InvalidArgument,
    PayloadInvalid,
    PayloadTooLarge,
    Unavailable,
    error_of,
)

EXPOSED = InvalidArgument("it would go unencrypted", option="token", hint="use {tls.ca}, or {insecure}")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InvalidArgument("it is wrong"), "it is wrong"),
        (InvalidArgument("it is {wrong}", hint="mend {it}"), "it is {wrong}: mend it"),
        (InvalidArgument("it is wrong", option="tls.ca"), "tls.ca: it is wrong"),
        (EXPOSED, "token: it would go unencrypted: use tls.ca, or insecure"),
    ],
)
def test_the_text_has_option_problem_and_hint(error: HeadraceError, text: str):
    assert str(error) == text


def test_the_text_for_a_command_line_has_its_options():
    flags = {"token": "--token", "tls.ca": "--ca"}
    assert EXPOSED.text_for(flags) == "--token: it would go unencrypted: use --ca, or insecure"
    assert InvalidArgument("token and {tls.ca} stay").text_for(flags) == "token and {tls.ca} stay"


def test_an_error_of_a_silo_has_its_text_alone():
    error = error_of("invalid_argument", str(EXPOSED))
    assert isinstance(error, InvalidArgument)
    assert (error.option, error.hint) == ("", "")
    assert error.text_for({"token": "--token"}) == str(EXPOSED)


@pytest.mark.parametrize("error", [EXPOSED, PayloadTooLarge("the event", 2, 1), CorruptRecord(1, 2, "checksum")])
def test_a_copy_has_the_text_and_the_data(error: HeadraceError):
    copy = error.copy()
    assert copy is not error
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_an_error_travels_between_processes():
    travelled = pickle.loads(pickle.dumps(EXPOSED))
    assert (str(travelled), vars(travelled)) == (str(EXPOSED), vars(EXPOSED))


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (ConnectionError("the database is down"), "the database is down"),
        (TimeoutError(), "TimeoutError"),
        (_Unprintable(), "_Unprintable"),
        (InvalidArgument("it is wrong", option="token"), "token: it is wrong"),
    ],
)
@pytest.mark.parametrize("kind", [Unavailable, PayloadInvalid])
def test_an_error_takes_its_text_from_an_exception(kind: type[HeadraceError], cause: Exception, text: str):
    error = kind(cause, hint="try again")
    assert (str(error), error.problem) == (f"{text}: try again", text)
    assert str(error.copy()) == str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_error_takes_several_arguments_as_other_exceptions_do():
    error = Unavailable("no answer", 111, ConnectionError("refused"), hint="try again")
    assert (str(error), error.problem) == ("no answer, 111, refused: try again", "no answer, 111, refused")
    assert str(error.copy()) == str(pickle.loads(pickle.dumps(error))) == str(error)
