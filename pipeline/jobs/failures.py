"""Errors of headrace in Spark's processes."""

from __future__ import annotations

import re

from pyspark.errors import PySparkException

from ...streams.errors import HeadraceError, error_of

ERROR_LINE = re.compile(r"^(?:Caused by: )?(?:[\w.]+\.)?(\w+): (.+)$", re.MULTILINE)
"""A line of a traceback, of Python or of Java, that has the name of an error's class and its text."""


def headrace_error(error: PySparkException) -> HeadraceError | None:
    """Return the error of headrace that one of Spark's processes raised, or None. It comes as text in a traceback."""
    kinds = {kind.__name__: kind for kind in _tree(HeadraceError)}
    found = [match for match in ERROR_LINE.finditer(str(error)) if match[1] in kinds]
    return error_of(kinds[found[-1][1]].code, found[-1][2]) if found else None


def _tree(kind: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _tree(child))]
