"""Files and classes stay small, no files import one another in a circle, and background work has its supervisor."""

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.plain_english import REPOSITORY

FOLDERS = (
    "adapters", "agents", "balancer", "cli", "client", "front_door", "pipeline", "server", "silo", "store", "streams",
)  # fmt: skip
MAX_FILE, MAX_CLASS, MAX_METHODS = 600, 300, 25

LARGE_CLASSES = {
    ("agents/delivery/delivery.py", "Delivery"),
    ("agents/delivery/group_delivery.py", "GroupDelivery"),
    ("client/routing.py", "Router"),
}
"""Classes of the path of remote consumers that are still larger."""

OWN_TASKS = {
    "adapters/conformance": "a suite of tests",
    "agents": "agents and deliveries end their tasks in steps",
    "cli/commands/subscribe.py": "awaited by its function",
    "client/blocking.py": "one call of a thread",
    "client/consumer.py": "its own run, which `aclose` awaits",
    "client/conversation.py": "awaited by its function",
    "client/publishing.py": "awaited by its function",
    "client/remote_subscription.py": "its own run, which `close` awaits",
    "client/routing.py": "one task for each session, which `run` ends",
    "pipeline/publishing.py": "awaited by its function",
    "server/native_server.py": "one task for each call, which its connection ends",
    "silo/delays.py": "the caller's answer",
    "silo/event_publisher.py": "the caller's answer",
    "silo/local.py": "one task for each call",
    "silo/gateway.py": "awaited by its function",
    "silo/gateway_pulls.py": "its own run, which `aclose` awaits",
    "silo/services/consumer_session.py": "awaited by its function",
    "silo/services/publisher.py": "awaited by its function",
    "silo/subscription_host.py": "awaited by its function",
    "silo/supervisor.py": "awaited by its function",
    "streams/background.py": "the supervisor itself",
    "streams/handler_workers.py": "a pool of tasks, which ends them in steps",
}
"""Files and folders that start tasks without `BackgroundTasks`, and the reason."""


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
    assert large == LARGE_CLASSES, (
        f"split classes of more than {MAX_CLASS} lines or {MAX_METHODS} methods by their responsibilities; take those "
        "that are small by now off the list"
    )


def test_background_work_runs_under_its_supervisor() -> None:
    starting = {
        source.path
        for source in sources()
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr in ("create_task", "ensure_future")
    }
    excepted = {path: [own for own in OWN_TASKS if path == own or path.startswith(f"{own}/")] for path in starting}
    assert {path for path, found in excepted.items() if not found} == set(), "use BackgroundTasks"
    assert OWN_TASKS.keys() - {own for found in excepted.values() for own in found} == set(), "take it off the list"


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


def test_no_files_import_one_another_in_a_circle() -> None:
    files = {module_of(source.path): source for source in sources()}
    left = {module: imported(source, {*files}) for module, source in files.items()}
    while last := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in last:
            del left[module]
    assert left.keys() == set(), "these files are in a circle, or import files that are"
