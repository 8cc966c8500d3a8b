"""What `headrace.pipeline.session` decides without a JVM."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.pipeline.session import register_format


@pytest.mark.parametrize(("python", "names"), [("/a/bin/python", []), ("/a b/bin/python", ["headrace"])])
def test_the_format_is_registered_if_the_path_of_python_has_a_space(
    python: str, names: list[str], monkeypatch: pytest.MonkeyPatch
):
    registered: list[Any] = []
    session = SimpleNamespace(dataSource=SimpleNamespace(register=registered.append))
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
    monkeypatch.setenv("PYSPARK_PYTHON", python)
    register_format(cast("Any", session))
    assert [source.name() for source in registered] == names
