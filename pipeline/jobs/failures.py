"""Errors of headrace in Spark's processes."""

from __future__ import annotations

import re

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from ...streams.errors import HeadraceError, error_of

ERROR_LINE = re.compile(r"^(?:Caused by: )?(?:[\w.]+\.)?(\w+): (.+)$", re.MULTILINE)
"""A line of a traceback, of Python or of Java, that has the name of an error's class and its text."""

SPARK_ERRORS = PySparkException, Py4JError
"""The errors that PySpark raises. Py4J raises the errors of Java that PySpark does not convert."""


def headrace_error(error: Exception) -> HeadraceError | None:
    """Return the error of headrace that one of Spark's processes raised, or None. It comes as text in a traceback."""
    kinds = {kind.__name__: kind for kind in _tree(HeadraceError)}
    found = [match for match in ERROR_LINE.finditer(str(error)) if match[1] in kinds]
    return error_of(kinds[found[-1][1]].code, found[-1][2]) if found else None


def spark_message(error: Exception) -> str:
    """Return the message of an error, with several lines. The text of Py4J's own begins with the call that failed."""
    if isinstance(error, Py4JJavaError):
        return str(error.java_exception.getMessage() or error.java_exception.toString())
    return str(error)


def _tree(kind: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _tree(child))]
