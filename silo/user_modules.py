"""Import the modules of a user, and find the subscriptions that they declare."""

from __future__ import annotations

import importlib
import linecache
import sys
import traceback
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePath

from ..streams.errors import InvalidArgument
from ..streams.failure_log import described
from ..streams.handlers import SubscriptionDeclaration, declared

INTERNAL_PACKAGES = ("headrace", "importlib")
"""Packages whose lines are left out of a message about the user's module."""


def declared_subscriptions(modules: Iterable[str], providers: Collection[str]) -> Sequence[SubscriptionDeclaration]:
    """Import modules, and return all subscriptions that are declared then.

    Raises InvalidArgument for a module that cannot be imported, and for a subscription of a provider that is not among
    `providers`.
    """
    for module in modules:
        import_module(module)
    for one in declared():
        if one.provider not in providers:
            raise InvalidArgument(
                f"subscription {one.definition.name!r} is declared for provider {one.provider!r}, which is not "
                f"configured: there is {', '.join(providers)}"
            )
    return declared()


def import_module(name: str) -> None:
    """Import a module of the user. The working directory is searched first.

    Raises InvalidArgument for the path of a file, and with the line of the user's code that failed, also if headrace
    refused the call in that line.
    """
    if any(mark in name for mark in "/\\") or name.startswith(".") or name.endswith(".py"):
        stem = PurePath(name.replace("\\", "/")).stem
        such_as = f", such as {stem!r}" if stem.isidentifier() else ""
        raise InvalidArgument(
            f"{name!r} is no name of a module: write one{such_as}, and run the command in the folder of its file"
        )
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, SyntaxError) and error.filename is not None:
            place, reason = (error.filename, error.lineno or 1), f"{type(error).__name__}: {error.msg}"
        else:
            place, reason = _last_line_of_the_user(error), described(error)
        where = ""
        if place is not None:
            code = linecache.getline(*place).strip()
            where = f", at {place[0]}:{place[1]}" + (f": {code}" if code else "")
        raise InvalidArgument(f"module {name!r} cannot be imported: {reason}{where}") from error


def _last_line_of_the_user(error: BaseException) -> tuple[str, int] | None:
    """Return the file and the number of the line of the user's code that failed, if there is one."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in INTERNAL_PACKAGES
    ]
    return frames[-1] if frames else None
