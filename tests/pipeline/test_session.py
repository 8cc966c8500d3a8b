"""What `headrace.pipeline.session` decides without a JVM."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from headrace.pipeline.session import own_session, register_format


class FakeSpark:
    """Makes sessions like Spark's. Its search has found the format, or not."""

    def __init__(self, search_finds_it: bool) -> None:
        self.search_finds_it = search_finds_it
        self.active: FakeSession | None = None


class FakeSession:
    """A session, and its Java object. It knows the formats that the search found, and its own registered ones."""

    def __init__(self, spark: FakeSpark) -> None:
        self._spark = spark
        self._jsparkSession = self
        self.registered: list[str] = []
        self.settings: dict[str, str] = {}
        self.conf = SimpleNamespace(set=self.settings.__setitem__)
        self.dataSource = SimpleNamespace(register=self.register)

    def newSession(self) -> "FakeSession":  # noqa: N802
        return FakeSession(self._spark)

    def knows(self, name: str) -> bool:
        return self._spark.search_finds_it or name in self.registered

    def register(self, source: Any) -> None:
        active = self._spark.active
        assert active is None or not active.knows(source.name()), "DATA_SOURCE_ALREADY_EXISTS"  # as Spark 4.3 says
        self.registered.append(source.name())

    def sessionState(self) -> Any:  # noqa: N802
        return SimpleNamespace(dataSourceManager=lambda: SimpleNamespace(dataSourceExists=self.knows))

    def getActiveSession(self) -> Any:  # noqa: N802
        active = self._spark.active
        return SimpleNamespace(isDefined=lambda: active is not None, get=lambda: active)

    def setActiveSession(self, session: "FakeSession | None") -> None:  # noqa: N802
        self._spark.active = session


def registering(spark: SparkSession) -> SparkSession:
    register_format(spark)
    return spark


@pytest.mark.parametrize("session_of", [registering, own_session])
@pytest.mark.parametrize(("search_finds_it", "names"), [(True, []), (False, ["headrace"])])
def test_a_session_registers_the_format_if_the_search_has_not_found_it(
    session_of: Callable[[SparkSession], SparkSession], search_finds_it: bool, names: list[str]
):
    session = FakeSession(FakeSpark(search_finds_it))
    assert cast("Any", session_of(cast("Any", session))).registered == names


def test_a_session_registers_the_format_although_the_active_session_knows_it():
    spark = FakeSpark(search_finds_it=False)
    spark.active = first = FakeSession(spark)
    register_format(cast("Any", first))
    register_format(cast("Any", first))
    own = cast("Any", own_session(cast("Any", first)))
    assert (first.registered, own.registered, spark.active) == (["headrace"], ["headrace"], first)
    assert own.settings["spark.sql.session.timeZone"] == "UTC"
