"""Checks of the arguments that users give. Each raises InvalidArgument in one line with the accepted values."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import msgspec

from .errors import InvalidArgument

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SHOWN = 100
"""Longest representation of a value in a message, in characters."""


def shown(value: object) -> str:
    """Return the value as messages show it: its representation, cut to 100 characters. Never raises."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 (it is nested too deeply, or `repr` runs foreign code)
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def refused(name: str, value: object, expected: str) -> InvalidArgument:
    """Return the error for a wrong value of the argument `name`."""
    return InvalidArgument(f"{name} is {shown(value)}: expected {expected}")


def check_integer(name: str, value: object, least: int = 0, most: int | None = None) -> int:
    """Return an integer from `least` to `most`; if `most` is None, there is no upper limit."""
    if type(value) is not int or value < least or (most is not None and value > most):
        accepted = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise refused(name, value, f"an integer {accepted}")
    return value


def check_seconds(name: str, value: object, *, above_zero: bool = False, most: float = math.inf) -> float:
    """Return a number of seconds from 0 to `most`; with `above_zero`, more than 0."""
    number = value if type(value) in (int, float) else math.nan
    if not (0 <= cast("float", number) <= most) or (above_zero and not number) or number == math.inf:
        least = "above 0" if above_zero else "of at least 0"
        limit = "" if most == math.inf else f", at most {most:,}"
        raise refused(name, value, f"a number of seconds {least}{limit}")
    return cast("float", number)


def check_flag(name: str, value: object) -> bool:
    """Return True or False. Other values, such as 1, are refused."""
    if type(value) is not bool:
        raise refused(name, value, "True or False")
    return value


def check_text(name: str, value: object) -> str:
    """Return text."""
    if not isinstance(value, str):
        raise refused(name, value, "a str")
    return value


def check_instance(name: str, value: object, kind: type[_T], example: str = "") -> _T:
    """Return an instance of `kind`. `example` says how to write one."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise refused(name, value, f"{article} {kind.__name__}{f', such as {example}' if example else ''}")
    return value


def check_path(name: str, value: object, *, optional: bool = False) -> str | os.PathLike[str]:
    """Return the path of a directory. A path with a NUL, or with a surrogate that stands for no byte, is refused.
    `optional` says that the caller accepts None, too."""
    path = cast("str | os.PathLike[str]", value)
    with suppress(TypeError, UnicodeEncodeError):
        if not isinstance(value, bytes) and b"\0" not in os.fsencode(path):
            return path
    expected = "the path of a directory, or None" if optional else "the path of a directory"
    raise refused(name, value, expected)


def check_choice(name: str, value: object, kind: type[Enum], *, optional: bool = False) -> None:
    """Accept a member of an enumeration; with `optional`, None too."""
    if not (isinstance(value, kind) or (optional and value is None)):
        members = [f"{kind.__name__}.{member.name}" for member in kind]
        raise refused(name, value, one_of([*members, "None"] if optional else members))


def check_callable(name: str, value: object) -> None:
    """Accept a function, or another object that can be called, or None."""
    if value is not None and not callable(value):
        raise refused(name, value, "a function or None")


def check_ids(name: str, ids: object) -> Sequence[int] | None:
    """Return the ids of dead letters, or None for all of them."""
    if ids is None:
        return None
    listed: list[object] = []
    if isinstance(ids, Iterable) and not isinstance(ids, str | bytes):
        listed = list(cast("Iterable[object]", ids))
        if all(type(each) is int for each in listed):
            return cast("list[int]", listed)
    raise refused(name, listed or cast("object", ids), "several integers, such as [1, 2], or None for all")


def check_options(call: str, given: Iterable[str], known: Collection[str], others: Collection[str] = ()) -> None:
    """Refuse unknown options of a call. The error names the known options, and the most similar name among them and
    `others`, the options of the call in another form."""
    for name in given:
        if name not in known:
            similar = did_you_mean(name, [*known, *others])
            expected = one_of(sorted(known)) if known else "none"
            raise InvalidArgument(f"{call}: unknown option {name!r}: expected {expected}{similar}")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of a message that names the most similar known name; empty if none is similar."""
    similar = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def check_call(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function or method: arguments that do not fit it raise InvalidArgument instead of TypeError."""

    @functools.wraps(function)
    def checked(*args: _P.args, **options: _P.kwargs) -> _T:
        try:
            return function(*args, **options)
        except TypeError:
            _check_signature(function, args, options)
            raise

    return checked


def check_methods(protocol: type) -> Callable[[type[_T]], type[_T]]:
    """Decorate a class that users call: `check_call` for its methods, also inherited ones, that `protocol` has."""

    def decorate(kind: type[_T]) -> type[_T]:
        for name in {name for each in protocol.__mro__ for name in vars(each)}:
            method = None if name.startswith("_") else getattr(kind, name, None)
            if inspect.isfunction(method) and not hasattr(method, "__wrapped__"):
                setattr(kind, name, check_call(method))
        return kind

    return decorate


def check_constructor(kind: type[_T]) -> type[_T]:
    """Decorate a class: `check_call` for its constructor."""
    kind.__init__ = check_call(kind.__init__)
    return kind


class CheckedStruct(msgspec.StructMeta):
    """Metaclass of a Struct whose constructor is checked as by `check_call`."""

    if not TYPE_CHECKING:  # type checkers use the fields

        def __call__(cls, *args: Any, **options: Any) -> Any:  # noqa: N805 (of a metaclass)
            try:
                return super().__call__(*args, **options)
            except TypeError:
                _check_signature(cls, args, options)
                raise


def _check_signature(function: Callable[..., Any], args: Sequence[object], options: Mapping[str, object]) -> None:
    call = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__")
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        if call == function.__qualname__:  # the user knows the class of the object, not the one that has the method
            call = f"{type(args[0]).__name__}.{function.__name__}"
        parameters, args = parameters[1:], args[1:]
    if all(each.kind is not each.VAR_KEYWORD for each in parameters):
        check_options(call, options, [each.name for each in parameters])
    by_position = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    named = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    if surplus := args[len(by_position) :]:
        if len(surplus) > len(named):
            takes = ", ".join(each.name for each in by_position) or "none"
            raise InvalidArgument(f"{call}: too many arguments ({len(args)}): expected {takes}")
        pairs = zip([*by_position, *named], args, strict=False)
        written = ", ".join(f"{parameter.name}={shown(value)}" for parameter, value in pairs if parameter in named)
        raise InvalidArgument(f"{call}: {shown(surplus[0])} has no name: write {call}({written})")
    by_place = [each.name for each in by_position[: len(args)]]
    if twice := [name for name in by_place if name in options]:
        raise InvalidArgument(f"{call}: {twice[0]!r} is given twice: leave out {twice[0]}={shown(options[twice[0]])}")
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in variable]
    if missing := [name for name in required if name not in {*options, *by_place}]:
        raise InvalidArgument(f"{call}: {missing[0]!r} is missing: expected {', '.join(required)}")


def one_of(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
