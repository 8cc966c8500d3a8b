"""Rules for files: their size, their imports, their tasks, and the names that tests use."""

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.conftest import LONGEST
from tests.plain_english import REPOSITORY

FOLDERS = (
    "adapters", "agents", "balancer", "cli", "client", "effects", "frameworks", "front_door", "pipeline", "server",
    "silo", "store", "streams", "testing",
)  # fmt: skip
MAX_FILE, MAX_CLASS, MAX_METHODS = 600, 300, 25

OWN_TASKS = {
    "adapters/conformance": "a suite of tests",
    "agents": "agents and deliveries end their tasks in steps",
    "cli/commands/subscribe.py": "awaited by its function",
    "client/blocking.py": "one call of a thread",
    "client/consumer.py": "its own run, which `aclose` awaits",
    "client/subscribe_call.py": "awaited by its function",
    "client/publishing.py": "awaited by its function",
    "client/remote_subscription.py": "its own run, which `close` awaits",
    "client/routing.py": "one task for each session, which `run` ends",
    "pipeline/publishing.py": "awaited by its function",
    "server/native_server.py": "one task for each call, which its connection ends",
    "silo/delays.py": "the caller's answer",
    "silo/event_publisher.py": "the caller's answer",
    "silo/shared_calls.py": "the answers of its callers",
    "silo/in_process.py": "one task for each call",
    "silo/gateway.py": "awaited by its function",
    "silo/services/consumer_session.py": "awaited by its function",
    "silo/services/publisher.py": "awaited by its function",
    "silo/services/pulling.py": "its own run, which `aclose` awaits",
    "silo/subscription_locks.py": "awaited by its function",
    "silo/supervisor.py": "awaited by its function",
    "streams/background.py": "the supervisor itself",
    "streams/handler_workers.py": "a pool of tasks, which ends them in steps",
}
"""Files and folders that start tasks without `BackgroundTasks`, and the reason."""


PRIVATE_USE = {
    "effects/driver_statement.py": "SQLAlchemy has no public method for errors of statements that bypass it",
    "adapters/log/transactions.py": "py-lmdb has no public name for the class",
    "pipeline/session.py": "PySpark has no public way to its JVM",
    "testing/plugin.py": "pytest has no public name for the fixtures of a function",
    "tests/agents": "random numbers, crashes and bounded caches that have no other seam, line by line",
}
"""Files and folders that switch off the check of private names, and the reason."""

PATCHING = {
    "tests/adapters/generator/test_generator_adapter.py": "the clock of its event loop",
    "tests/adapters/kafka/test_kafka_mistakes.py": "times each call of the event loop",
    "tests/adapters/log/test_log_adapter.py": "sees in which thread a block is read",
    "tests/adapters/log/test_log_commit.py": "sees whether the system's sync was called",
    "tests/adapters/log/test_log_offers.py": "a ring of another process that comes too late",
    "tests/server/test_grpc_server.py": "a machine whose name has an address that it does not have",
    "tests/adapters/redis/test_redis_producers.py": "a process that dies between two writes",
    "tests/adapters/redis/test_redis_provider.py": "no checkpoint comes between two steps",
    "tests/agents": "clocks and intervals of agents",
    "tests/balancer/test_balancers.py": "a plug-in on Python's path",
    "tests/benchmarks/test_peers.py": "a package that is not installed",
    "tests/cli/test_backup.py": "a provider that is created between two steps",
    "tests/cli/test_repair.py": "a rename that the system refuses",
    "tests/cluster/planted.py": "plants bugs",
    "tests/cluster/simulated.py": "intervals and names that its processes share",
    "tests/effects/test_remote_effects.py": "a wait of 30 s",
    "tests/silo/services/test_cluster.py": "counts calls of an adapter in a whole silo",
    "tests/silo/services/test_consumer.py": "a control store that is away",
    "tests/silo/services/test_publisher.py": "counts calls of an adapter in a whole silo",
    "tests/silo/test_consumer_groups.py": "a group and a provider that fail once",
    "tests/silo/test_gateway.py": "clients in the silo's process that call it as remote ones do",
    "tests/silo/test_metrics.py": "a bug of an adapter",
    "tests/silo/test_why_gathering.py": "a slow queue, and streams in several queues",
    "tests/simulation/clocks.py": "clocks of the machine",
    "tests/spark/conftest.py": "PySpark starts its JVM by a fork",
    "tests/spark/test_replay.py": "progress is noted after each chunk",
    "tests/storage/planted.py": "plants bugs",
    "tests/store/test_cluster_store.py": "the wall clock",
}
"""Files and folders of tests that replace attributes, and the reason. Other tests pass arguments."""


class Source(NamedTuple):
    """A file of the product."""

    path: str
    lines: int
    nodes: Sequence[ast.AST]


@cache
def sources() -> Sequence[Source]:
    found: list[Source] = []
    for folder in FOLDERS:
        for file in sorted((REPOSITORY / folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            nodes = list(ast.walk(ast.parse(text)))
            found.append(Source(file.relative_to(REPOSITORY).as_posix(), text.count("\n"), nodes))
    return found


def test_files_are_small() -> None:
    assert {source.path for source in sources() if source.lines > MAX_FILE} == set(), (
        f"split files of more than {MAX_FILE} lines"
    )


def test_classes_are_small() -> None:
    large: set[tuple[str, str]] = set()
    for source in sources():
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                if lines > MAX_CLASS or methods > MAX_METHODS:
                    large.add((source.path, node.name))
    assert large == set(), (
        f"split classes of more than {MAX_CLASS} lines or {MAX_METHODS} methods by their responsibilities"
    )


def test_background_work_runs_under_its_supervisor() -> None:
    starting = {
        source.path
        for source in sources()
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr in ("create_task", "ensure_future")
    }
    check_exceptions(starting, OWN_TASKS)


def files_with(words: Sequence[str], *folders: str) -> set[str]:
    """Return the Python files in these folders, except this one, in which one of the words occurs."""
    found = (file for folder in folders for file in (REPOSITORY / folder).rglob("*.py") if file != Path(__file__))
    return {
        file.relative_to(REPOSITORY).as_posix()
        for file in found
        if any(word in file.read_text(encoding="utf-8") for word in words)
    }


def check_exceptions(found: set[str], listed: Mapping[str, str]) -> None:
    """Check that each file is listed, alone or by its folder, and that each entry of the list is needed."""
    needed = {path: {each for each in listed if path == each or path.startswith(f"{each}/")} for path in found}
    assert {path for path, entries in needed.items() if not entries} == set()
    assert listed.keys() - {entry for entries in needed.values() for entry in entries} == set(), "take it off the list"


def test_private_names_are_used_only_where_no_public_one_serves() -> None:
    check_exceptions(files_with(["reportPrivateUsage"], *FOLDERS, "tests", "benchmarks", "examples"), PRIVATE_USE)


def test_tests_replace_attributes_only_where_no_argument_serves() -> None:
    check_exceptions(files_with([".setattr(", "patch.object("], "tests"), PATCHING)


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(source: Source, modules: set[str]) -> set[str]:
    """The modules of the product that a file imports when it runs: not those for type checkers only."""
    typing = {
        id(inner)
        for node in source.nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    package = Path(source.path).parent.parts
    found: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in typing:
            above = package[: len(package) - node.level + 1]
            module = ".".join([*above, *([node.module] if node.module else [])])
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= (names & modules) or {module}
    return (found & modules) - {module_of(source.path)}


def test_files_that_begin_first_in_a_run_are_there() -> None:
    assert [path for path in LONGEST if not (REPOSITORY / path).exists()] == []
    assert len(set(LONGEST)) == len(LONGEST)


def test_no_files_import_one_another_in_a_circle() -> None:
    files = {module_of(source.path): source for source in sources()}
    left = {module: imported(source, {*files}) for module, source in files.items()}
    while last := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in last:
            del left[module]
    assert left.keys() == set(), "these files are in a circle, or import files that are"


CURSORS = {
    "agents/cache.py": ("Cursor",),
    "agents/cursor.py": ("StreamCursor", "CursorFailures"),
    "agents/delivery/offered_streams.py": ("OfferedStreams",),
    "agents/delivery/progress.py": ("DeliveryProgress",),
    "agents/delivery/stream_cursors.py": ("StreamCursors",),
}
"""The classes that own positions, by the files that alone may write their fields."""

ABOVE_AGENTS = ("agents/", "cli/", "pipeline/", "silo/")
"""The folders whose code may have a cursor: the others may not import `agents`, and are passed none."""

SAME_NAMES = {
    "agents/agent.py": {"delivery.progress.on_parked"},  # a callback, which only the agent sets
    "agents/delivery/fairness.py": {"actor.state"},
    "agents/delivery/handling.py": {"batch.offset"},
    "agents/delivery/parcel.py": {"piece.batch"},
    "cli/demo/run.py": {"self.record.state"},
    "pipeline/jobs/files.py": {"archive.state"},
    "pipeline/jobs/replay.py": {"plan.done"},
}
"""Other fields with the name of such a field, where they are written from outside. Each was looked at."""


def fields_of(kind: ast.ClassDef) -> set[str]:
    """Return the fields that a class declares, lists as slots, or assigns to itself."""
    nodes = list(ast.walk(kind))
    declared = {ast.unparse(node.target) for node in kind.body if isinstance(node, ast.AnnAssign)}
    slots = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assigned = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return declared | assigned | {name for name in slots if name.isidentifier()}


def test_only_the_progress_writes_fields_of_cursors() -> None:
    """No other file writes them: not under another variable's name, not in a subclass, and not by `setattr`.

    The check knows no types, so it finds every write to an attribute with the name of such a field. The fields are no
    read-only properties, because each delivery reads them several times, and a property costs a call.
    """
    classes = [(source.path, node) for source in sources() for node in source.nodes if isinstance(node, ast.ClassDef)]
    owners = {node.name: node for path, node in classes if node.name in CURSORS.get(path, ())}
    assert len(owners) == sum(map(len, CURSORS.values()))
    fields = set[str]().union(*map(fields_of, owners.values()))
    assert {"batch", "index", "offset", "state", "feed", "done", "trouble", "base", "attempts"} <= fields
    written: dict[str, set[str]] = {}
    for source in sources():
        if source.path in CURSORS or not source.path.startswith(ABOVE_AGENTS):
            continue
        for node in source.nodes:
            if not isinstance(node, ast.Attribute | ast.Subscript) or isinstance(node.ctx, ast.Load):
                continue
            to = node.value if isinstance(node, ast.Subscript) else node
            if isinstance(to, ast.Attribute) and to.attr in fields and ast.unparse(to.value) != "self":
                written.setdefault(source.path, set()).add(ast.unparse(to))
    assert written == SAME_NAMES
    derived = {node.name for _, node in classes if any(ast.unparse(base) in owners for base in node.bases)}
    assert derived == {"StreamCursor", "OfferedStreams", "DeliveryProgress"}, (
        "a subclass could write the fields of its base"
    )
    assert files_with(["setattr(", "__dict__", "vars("], "agents", "silo") == set()
