"""Tables of options, as configurations and adapters have them: conversion by msgspec, and its errors in one line.

An error names the option, its value and the accepted ones: `queues = "8": expected an integer >= 1; write queues = 8`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

from .arguments import did_you_mean, one_of
from .errors import InvalidArgument

MAX_SHOWN = 60
"""Characters of a wrong value that a message shows."""

_SCALARS: Mapping[type[inspect.Type], Any] = {inspect.IntType: int, inspect.FloatType: float, inspect.BoolType: bool}

Table = Mapping[str, Any]
OptionPath = tuple[str, ...]

_T = TypeVar("_T")


class OptionTable(Generic[_T]):
    """Tables that are converted into a Struct or dataclass."""

    def __init__(self, kind: type[_T]) -> None:
        self._kind = kind
        self._type = inspect.type_info(kind)

    def convert(self, table: Table, name: Callable[[OptionPath], str]) -> _T:
        """Convert `table`, or raise InvalidArgument. `name` returns the source and the option of a path."""
        try:
            return msgspec.convert(table, self._kind)
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(" - at `$")
            path = self._resolve(table, place.rstrip("`"), str(error))
            if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", message):
                known, hint = self._fields(path), ""
                if path and unknown[1] in self._fields(()):
                    hint = f". {unknown[1]} belongs to the top, not into {'.'.join(path)}"
                raise InvalidArgument(
                    f"{name((*path, unknown[1]))}: unknown option; accepted are {', '.join(known)}"
                    f"{hint or did_you_mean(unknown[1], known)}"
                ) from None
            if required := re.fullmatch(r"Object missing required field `(.*)`", message):
                raise InvalidArgument(f"{name((*path, required[1]))}: it is missing") from None
            if error.__cause__ is not None:  # options that do not go together
                raise InvalidArgument(f"{name((*path, ''))}: {message}") from None
            raise InvalidArgument(f"{name(path)}{_problem(path, self.type_of(path), value_at(table, path))}") from None

    def type_of(self, path: OptionPath) -> inspect.Type | None:
        """The type of the option at `path`, without None; None if there is no such option."""
        kind: inspect.Type | None = self._type
        for name in path:
            if isinstance(kind, inspect.VarTupleType | inspect.ListType):
                kind = kind.item_type
            if isinstance(kind, inspect.StructType | inspect.DataclassType):
                kind = next((field.type for field in kind.fields if field.name == name), None)
            else:
                kind = kind.value_type if isinstance(kind, inspect.DictType) else None
            if isinstance(kind, inspect.UnionType):
                kind = next(each for each in kind.types if not isinstance(each, inspect.NoneType))
        return kind

    def _fields(self, path: OptionPath) -> Sequence[str]:
        kind = self.type_of(path)
        fields = kind.fields if isinstance(kind, inspect.StructType | inspect.DataclassType) else ()
        return [field.name for field in fields]

    def _resolve(self, table: Table, place: str, message: str) -> OptionPath:
        """The path at `place`, such as `.providers[...].queues`. msgspec does not tell the key of a mapping: the right
        one gives the same error by itself."""
        path: OptionPath = ()
        for part in re.findall(r"\.(\w+)|(\[\.\.\.\])|\[\d+\]", place):
            if part[0]:
                path = (*path, part[0])
            elif part[1]:
                entries: Table = value_at(table, path)
                fails = (key for key, entry in entries.items() if self._fails(nested((*path, key), entry), message))
                path = (*path, next(fails))
        return path

    def _fails(self, table: Table, message: str) -> bool:
        try:
            msgspec.convert(table, self._kind)
        except msgspec.ValidationError as error:
            return str(error) == message
        return False


def parse(kind: inspect.Type | None, text: str) -> Any:
    """Return the value that a text means for an option of this type. A text that the type does not accept stays as it
    is."""
    if isinstance(kind, inspect.VarTupleType):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        if isinstance(kind, inspect.AnyType):
            return msgspec.json.decode(text)
        if kind is not None and (scalar := _SCALARS.get(type(kind))) is not None:
            return msgspec.convert(text, scalar | None, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError):  # the last one for JSON that is too deep
        pass
    return text


def nested(path: OptionPath, value: Any) -> dict[str, Any]:
    """Return the table that has only this option."""
    for name in reversed(path):
        value = {name: value}
    return value


def value_at(table: Any, path: OptionPath) -> Any:
    """Return the option at `path`; None if it is not given."""
    for name in path:
        table = table.get(name) if isinstance(table, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return table  # pyright: ignore[reportUnknownVariableType]


def _problem(path: OptionPath, kind: inspect.Type | None, value: Any) -> str:
    shown = _shown(value)
    given = f" = {shown}" if shown and len(shown) <= MAX_SHOWN else ""
    wanted = _fitting(kind, value)
    hint = "" if wanted is None else f"; write {path[-1]} = {json.dumps(wanted, ensure_ascii=False)}"
    return f"{given}: expected {_expected(kind)}{hint}"


def _shown(value: Any) -> str:
    """The value as a message shows it; empty for none, for a table, and for a value that is too large to be shown."""
    if value is None or isinstance(value, dict):
        return ""
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (RecursionError, ValueError):  # nested too deeply; an integer of more than 4,300 digits
        return ""


def _fitting(kind: inspect.Type | None, value: Any) -> Any:
    """The value that was probably meant, None if there is none."""
    if isinstance(value, str) and isinstance(kind, inspect.VarTupleType):
        return [value]
    if isinstance(value, int | float) and not isinstance(value, bool) and isinstance(kind, inspect.StrType):
        return str(value)
    if isinstance(value, str) and kind is not None and type(kind) in _SCALARS:
        parsed = parse(kind, value)
        return None if isinstance(parsed, str) else parsed
    return None


def _expected(kind: inspect.Type | None) -> str:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            limits = {">=": kind.ge, ">": kind.gt, "<=": kind.le, "<": kind.lt}
            shown = "" if isinstance(kind, inspect.IntType) else "g"  # a whole number, not 1.04858e+06
            bounds = " and ".join(f"{sign} {limit:{shown}}" for sign, limit in limits.items() if limit is not None)
            return f"{'an integer' if isinstance(kind, inspect.IntType) else 'a number'} {bounds}".rstrip()
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType():
            return one_of([f'"{value}"' for value in kind.values])
        case inspect.VarTupleType():
            return "a list of texts"
        case inspect.StructType() | inspect.DictType():
            return "a table"
        case _:
            return "text"
