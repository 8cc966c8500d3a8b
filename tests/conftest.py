"""The conditions of every test: no blocked event loop, no task left behind, Hypothesis without a deadline."""

import asyncio
import gc
import inspect
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Generator, Iterator
from functools import cache
from pathlib import Path
from shutil import disk_usage
from tempfile import gettempdir

import pytest
import pytest_asyncio
from blockbuster import BlockBuster
from hypothesis import HealthCheck, Phase, settings
from xdist.remote import Producer  # pyright: ignore[reportMissingTypeStubs]
from xdist.scheduler import LoadFileScheduling  # pyright: ignore[reportMissingTypeStubs]

from tests import memory_folder
from tests.random_examples import PROFILE, examples

# A shell without job control makes its background processes ignore interrupts: every process here would ignore them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# For `benchmarks`. At the end: the checkout has metadata of its own after a build.
sys.path.append(str(Path(__file__).parents[1]))

LIBRARY = [
    f"headrace.{package}"
    for package in (
        "streams",
        "store",
        "adapters",
        "balancer",
        "client",
        "agents",
        "server",
        "silo",
        "pipeline",
        "frameworks",
    )
]

# `make test` draws the same examples each time, so that it passes or fails because of a change. The other profiles draw
# new ones: those that fail are kept in .hypothesis and tried first the next time. To explain failures Hypothesis would
# trace everything that passes, too. Other tests take the processor meanwhile: that is no reason to fail.
settings.register_profile(
    "thorough",
    deadline=None,
    derandomize=False,
    phases=set(Phase) - {Phase.explain},
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("thorough"), max_examples=examples(100), derandomize=True)
settings.register_profile("ci", settings.get_profile("thorough"), print_blob=True)
settings.load_profile(PROFILE)


LONGEST = (
    "tests/spark",
    "tests/adapters/kafka/test_conformance_kafka.py",
    "tests/adapters/kafka",
    "tests/silo/services/test_consumer.py",
    "tests/silo/test_gateway.py",
    "tests/cli/test_workers.py",
    "tests/examples/test_other_languages.py",
    "tests/cli/test_dev.py",
    "tests/cli/test_cli_reports.py",
    "tests/cli/test_cli_subscribe.py",
    "tests/cli/test_cli_cluster.py",
    "tests/cli/test_cli.py",
    "tests/cli/test_check.py",
    "tests/cli/test_demo.py",
    "tests/cli/test_commands_with_silos.py",
    "tests/effects/test_transactional_handlers.py",
    "tests/cli/test_cli_publish.py",
    "tests/examples/test_node.py",
    "tests/effects/test_remote_effects.py",
    "tests/website/test_site.py",
    "tests/effects/test_dead_letters.py",
    "tests/cli/test_cli_effects.py",
    "tests/effects/test_postgres_pitfalls.py",
    "tests/silo/dashboard/test_browser.py",
    "tests/silo/test_metrics.py",
    "tests/adapters/postgres/test_postgres_outages.py",
    "tests/cli/top/test_top.py",
    "tests/silo/test_prometheus.py",
    "tests/documents/test_pages.py",
    "tests/testing/test_plugin.py",
    "tests/cluster/test_simulated_clusters.py",
    "tests/client/test_outages.py",
    "tests/cli/test_tokens.py",
    "tests/client/test_publishing.py",
    "tests/adapters/redis/test_redis_shards.py",
    "tests/cli/test_subscribe_with_silos.py",
    "tests/effects/test_outbox.py",
    "tests/client/test_native.py",
    "tests/cli/test_repair.py",
    "tests/store/test_store.py",
    "tests/silo/test_silo.py",
    "tests/test_readme.py",
    "tests/store/test_store_model.py",
    "tests/effects/test_bank_kills.py",
    "tests/silo/test_conformance_delays.py",
    "tests/silo/test_delays.py",
    "tests/faults/test_why_injected.py",
    "tests/adapters/redis/test_redis_provider.py",
    "tests/adapters/redis/test_redis_faults.py",
    "tests/store/test_store_failures.py",
    "tests/silo/services/test_subscription_service.py",
    "tests/silo/services/test_consumer_model.py",
    "tests/benchmarks/test_delays.py",
    "tests/benchmarks/test_over_grpc.py",
    "tests/benchmarks/test_peers.py",
    "tests/faults/test_cluster_kills.py",
    "tests/adapters/redis/test_redis_guide.py",
    "tests/agents/delivery/test_group_random.py",
    "tests/agents/test_outage.py",
    "tests/storage/test_power_loss.py",
    "tests/type_checking/test_type_checkers.py",
)
"""The files that take longest, and folders of one process, in this order. At the end of the run one process would run
such a file while the others have nothing to do. `test_code_layout.py` checks that they are there."""
LEAST_FREE = 4 << 30
"""Bytes. One run with its environment took 3.3 GB."""
FOLDERS_OF_ONE_PROCESS = ("tests/spark", "tests/adapters/kafka")
"""Their tests share a JVM: Spark, and Kafka's broker."""
FILES_OF_THEIR_OWN = ("tests/adapters/kafka/test_conformance_kafka.py",)
"""They would take half of the time of their folder. Each starts a JVM."""


class WorkQueue(OrderedDict[str, dict[str, bool]]):
    """Takes `LONGEST` first."""

    def popitem(self, last: bool = True) -> tuple[str, dict[str, bool]]:
        longest = next((scope for scope in LONGEST if scope in self), None)
        return super().popitem(last) if longest is None else (longest, self.pop(longest))


class FileScheduling(LoadFileScheduling):
    """Runs all tests of a file in one process. The files of each of `FOLDERS_OF_ONE_PROCESS` share one, but not
    `FILES_OF_THEIR_OWN`."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        self.workqueue = WorkQueue()

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file in FILES_OF_THEIR_OWN:
            return file
        folders = (folder for folder in FOLDERS_OF_ONE_PROCESS if nodeid.startswith(f"{folder}/"))
        return next(folders, file)


def pytest_configure(config: pytest.Config) -> None:
    memory_folder.use_memory_folder(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collected tests and imported modules out of later garbage collections, which would take a tenth of the
    processor's time to go through them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse to start on a full disk: servers end there, and mapped files end the process of the tests."""
    folder = gettempdir()
    free = disk_usage(folder).free
    if free < LEAST_FREE:
        pytest.exit(f"{folder} has {free >> 20} MiB free, and the tests need {LEAST_FREE >> 20}: remove files", 2)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and pytest_asyncio.is_async_test(item):
            # In front: set up before the test's own fixtures, and torn down after them.
            item.fixturenames[:0] = ["loop_never_blocks", "no_task_left_behind"]


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """Fail a test that leaves a variable set for later tests. Variables that Spark sets for its JVM, and those set with
    the import of grpc, stay for the process."""
    before = dict(os.environ)
    yield
    changed = {name for name, _ in before.items() ^ os.environ.items()}
    left = sorted(name for name in changed if not name.startswith(("PYTEST_", "SPARK_", "PYSPARK_", "GRPC_")))
    for name in left:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    assert not left, f"environment variables left behind: {', '.join(left)}"


@pytest.fixture
def loop_never_blocks() -> Iterator[None]:
    """A blocking call (file, socket, sqlite3, lock, sleep) that the library makes on an event loop's thread raises."""
    blocking = blocking_calls()
    blocking.activate()
    # A channel of grpc that is collected while a loop runs takes a lock for a moment; if it may not, it leaks.
    blocking.functions["threading.Lock.acquire"].deactivate()
    yield
    blocking.deactivate()


@cache
def blocking_calls() -> BlockBuster:
    """Made once: it looks up each function and each package."""
    blocking = BlockBuster(LIBRARY)
    for function in blocking.functions.values():  # asyncpg looks for certificates and passwords when it connects
        function.can_block_in("/asyncpg/connect_utils.py", {"_parse_connect_dsn_and_args"})
    return blocking


def of_grpc(coroutine: object) -> bool:
    """Whether grpc made the coroutine: if a write fails as its call ends, grpc leaves tasks (grpc/grpc#36066). Some of
    them run Cython, whose coroutines are not Python's."""
    return not inspect.iscoroutine(coroutine) or "/grpc/aio/" in coroutine.cr_code.co_filename


@pytest_asyncio.fixture
async def no_task_left_behind() -> AsyncIterator[None]:
    """A task that outlives the test, and the closing of its fixtures, fails it."""
    before = asyncio.all_tasks()
    yield
    for _ in range(10):  # the task cancelled last needs a turn of the loop or two
        await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=1)  # one that ignores it is left to the closing of the loop
    ours = sorted(f"{task.get_name()} {task.get_coro()}" for task in left if not of_grpc(task.get_coro()))
    assert not ours, f"tasks left behind: {', '.join(ours)}"
