"""The pytest plugin, beside other plugins for async tests and alone. Each test runs pytest in another process."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import asyncio

import pytest

{marks}

@pytest.fixture
async def loop_of_fixture(headrace):
    yield asyncio.get_running_loop()
    await asyncio.sleep(3600)


@pytest.fixture
async def hour():
    await asyncio.sleep(3600)
    return 3600


@pytest.fixture
def headrace_options():
    return {{"queues": 3}}


async def test_async(headrace):
    await asyncio.sleep(3600)
    assert headrace.queues == 3


async def test_fixtures(loop_of_fixture, hour):
    assert loop_of_fixture is asyncio.get_running_loop()
    assert hour == 3600


@pytest.mark.parametrize("number", [1, 2])
async def test_parameters(headrace, number):
    assert number


class TestClass:
    @pytest.fixture
    async def of_class(self):
        self.own = 1
        return self

    async def test_method(self, headrace, of_class):
        assert of_class is self
        assert self.own == 1


def test_sync(headrace):
    assert headrace.run(asyncio.sleep(3600, 5)) == 5


async def handle(event):
    raise ValueError("no carrier")


async def test_fails(headrace):
    await headrace.subscribe("ship", "orders/*", handle)
    await headrace.stream("orders", "1").publish(b"a")
    await headrace.settled()
    assert 1 == 2


async def test_waits(headrace):
    await asyncio.Event().wait()
"""


def run_pytest(folder: Path, *arguments: str, tests: str = TESTS, marks: str = "") -> str:
    (folder / "test_it.py").write_text(tests.format(marks=marks))
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("marks", "arguments"),
    [
        ("", ["-p", "no:asyncio", "-p", "no:anyio"]),
        # These two take seconds. The tests of this repository run with asyncio_mode=auto, too.
        pytest.param("", ["-o", "asyncio_mode=auto"], marks=pytest.mark.slow),
        ("pytestmark = pytest.mark.asyncio", ["-o", "asyncio_mode=strict", "-k", "not test_sync"]),
        pytest.param("", ["-p", "no:asyncio", "-o", "anyio_mode=auto", "-k", "not test_sync"], marks=pytest.mark.slow),
    ],
    ids=["alone", "asyncio auto", "asyncio strict", "anyio auto"],
)
def test_async_tests_run_in_virtual_time_whichever_plugins_there_are(
    tmp_path: Path, marks: str, arguments: list[str]
) -> None:
    scope = [] if "no:asyncio" in arguments else ["-o", "asyncio_default_fixture_loop_scope=function"]
    shown = run_pytest(tmp_path, *arguments, *scope, marks=marks)
    assert f"2 failed, {5 if '-k' in arguments else 6} passed" in shown, shown
    assert "ship orders/1 0 'a' attempt 1: failed: ValueError: no carrier" in shown
    assert "dead letter of ship: orders/1 0 'a', 8 attempts: ValueError: no carrier" in shown
    assert "(in test_waits) waits for ever: every task waits" in shown


@pytest.mark.long
def test_a_run_that_does_not_use_the_fixture_imports_no_engine(tmp_path: Path) -> None:
    tests = (
        "import sys\n\n\ndef test_modules():\n"
        "    loaded = [name for name in sys.modules if name.startswith('headrace')]\n"
        "    assert loaded == ['headrace', 'headrace.testing', 'headrace.testing.plugin']\n"
        "    assert not {{'sqlalchemy', 'grpc', 'msgspec', 'lmdb'}} & sys.modules.keys()\n"
    )
    shown = run_pytest(tmp_path, "-p", "no:asyncio", "-p", "no:hypothesispytest", tests=tests)
    assert "1 passed" in shown, shown


@pytest.mark.long
def test_another_fixture_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    tests = (
        "import pytest\n\n\n@pytest.fixture\ndef headrace():\n    return 5\n\n\n"
        "def test_sync(headrace):\n    assert headrace == 6\n\n\n"
        "async def test_async(headrace):\n    assert headrace == 5\n"
    )
    options = ["asyncio_mode=auto", "asyncio_default_fixture_loop_scope=function"]
    shown = run_pytest(tmp_path, *[word for option in options for word in ("-o", option)], tests=tests)
    assert "1 failed, 1 passed" in shown, shown
    assert "INTERNALERROR" not in shown


OPTIONS_FROM_ASYNC_FIXTURES = """
import asyncio

import pytest

ended = []


@pytest.fixture
async def queues():
    await asyncio.sleep(3600)
    yield asyncio.get_running_loop(), 3
    await asyncio.sleep(3600)
    ended.append("queues")


@pytest.fixture
async def headrace_options(queues):
    await asyncio.sleep(3600)
    assert asyncio.get_running_loop() is queues[0]
    return {{"queues": queues[1]}}


async def test_async(headrace, queues):
    assert headrace.queues == 3
    assert asyncio.get_running_loop() is queues[0]


def test_sync(headrace):
    assert ended == ["queues"]
    assert headrace.queues == 3


@pytest.fixture
async def stuck():
    await asyncio.Event().wait()


async def test_stuck(stuck, headrace):
    pass
"""


@pytest.mark.long
@pytest.mark.parametrize("arguments", [["-p", "no:asyncio", "-p", "no:anyio"], ["-o", "asyncio_mode=auto"]])
def test_the_options_of_the_provider_may_come_from_async_fixtures(tmp_path: Path, arguments: list[str]) -> None:
    scope = [] if "no:asyncio" in arguments else ["-o", "asyncio_default_fixture_loop_scope=function"]
    shown = run_pytest(tmp_path, *arguments, *scope, tests=OPTIONS_FROM_ASYNC_FIXTURES)
    assert "2 passed, 1 error" in shown, shown
    assert "(in stuck) waits for ever: every task waits" in shown
