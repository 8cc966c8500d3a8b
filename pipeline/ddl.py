"""A check of Spark's schema language (DDL), for errors that name the option.

Spark itself parses the schema later, together with the other columns, and its error names neither.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..streams.errors import InvalidArgument

_TOKEN = re.compile(
    r"""\s*(?P<text>`(?:[^`]|``)+`|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\w+|[<>(),:]|\S)""",
)
_SIMPLE_TYPES = frozenset(
    {
        *("boolean", "byte", "tinyint", "short", "smallint", "int", "integer", "long", "bigint"),
        *("float", "real", "double", "dec", "decimal", "numeric", "char", "character", "varchar", "string", "binary"),
        *("date", "time", "timestamp", "timestamp_ltz", "timestamp_ntz", "variant", "void"),
    }
)


class _Token(NamedTuple):
    text: str
    position: int


def check_fields(option: str, ddl: str) -> None:
    """Check fields such as `id INT, tags ARRAY<STRING>`. Raise InvalidArgument that names the option and the place."""
    parser = _Parser(option, ddl)
    parser.fields(end="")


class _Parser:
    def __init__(self, option: str, ddl: str) -> None:
        self._option = option
        self._ddl = ddl
        self._tokens = [_Token(found["text"], found.start("text")) for found in _TOKEN.finditer(ddl)]
        self._tokens.append(_Token("", len(ddl)))
        self._next = 0

    def fields(self, end: str) -> None:
        while True:
            self._field()
            if not self._accept(","):
                break
        self._require(end, "',' and another field" + (f", or '{end}'" if end else ""))

    def _field(self) -> None:
        name = self._take()
        if not re.fullmatch(r"`.+`|\w+", name.text):
            self._refuse(name, "the name of a field")
        self._accept(":")
        self._type()
        if self._accept("not"):
            self._require("null", "NULL after NOT")
        if self._accept("comment"):
            text = self._take()
            if text.text[:1] not in ("'", '"') or len(text.text) == 1:
                self._refuse(text, "a text in quotes after COMMENT")

    def _type(self) -> None:
        token = self._take()
        match token.text.lower():
            case "array":
                self._require("<", "'<' after ARRAY")
                self._type()
                self._require(">", "'>'")
            case "map":
                self._require("<", "'<' after MAP")
                self._type()
                self._require(",", "',' between the types of MAP")
                self._type()
                self._require(">", "'>'")
            case "struct":
                self._require("<", "'<' after STRUCT")
                self.fields(end=">")
            case simple if simple in _SIMPLE_TYPES:
                self._parameters()
            case _:
                self._refuse(token, "a type such as STRING, INT, DOUBLE or ARRAY<STRING>")

    def _parameters(self) -> None:
        if not self._accept("("):
            return
        while True:
            number = self._take()
            if not number.text.isdecimal():
                self._refuse(number, "a number")
            if not self._accept(","):
                break
        self._require(")", "')'")

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        self._next += token.text != ""
        return token

    def _accept(self, text: str) -> bool:
        accepted = self._tokens[self._next].text.lower() == text
        self._next += accepted
        return accepted

    def _require(self, text: str, expected: str) -> None:
        token = self._tokens[self._next]
        if token.text.lower() != text:
            self._refuse(token, expected)
        self._take()

    def _refuse(self, token: _Token, expected: str) -> None:
        found = f"{token.text!r} at position {token.position + 1}" if token.text else "the end"
        raise InvalidArgument(f"option {self._option!r}: expected {expected}, found {found} of {self._ddl!r}")
