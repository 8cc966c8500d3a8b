"""What users import: a name that comes, goes or changes its place shows here. And importing it stays light."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

PUBLIC = {
    "headrace": {
        "BatchObserver",
        "Busy",
        "CacheOptions",
        "Client",
        "Closed",
        "Codec",
        "Consumer",
        "ConsumerState",
        "CorruptRecord",
        "DataDirectoryError",
        "DeadLetter",
        "DefinitionConflict",
        "Effects",
        "Event",
        "EventBatch",
        "Fenced",
        "GapRecord",
        "HeadraceError",
        "InvalidArgument",
        "JsonCodec",
        "LimitExceeded",
        "Mode",
        "MsgpackCodec",
        "NotFound",
        "NotSupported",
        "Observer",
        "OnFailure",
        "Outbox",
        "PayloadInvalid",
        "PayloadTooLarge",
        "PermissionDenied",
        "ProducerSequence",
        "Provider",
        "ProviderOptions",
        "ProviderStatistics",
        "Pulled",
        "QueueFull",
        "QueueId",
        "Receipt",
        "ReceivedBatch",
        "RetryPolicy",
        "Selector",
        "SequenceConflict",
        "SequenceToken",
        "SessionState",
        "SlowConsumer",
        "Start",
        "StorageError",
        "StorageFull",
        "Stream",
        "StreamId",
        "StreamProvider",
        "StreamState",
        "SubscriptionDefinition",
        "SubscriptionState",
        "SyncBatch",
        "SyncClient",
        "SyncConsumer",
        "SyncPulled",
        "SyncStream",
        "SyncStreamProvider",
        "Tls",
        "Transaction",
        "Unauthenticated",
        "Unavailable",
        "disable_tracing",
        "enable_tracing",
        "subscription",
    },
    "headrace.adapters": {
        "AdapterContext",
        "AdapterFactory",
        "Backlog",
        "Bounds",
        "Capabilities",
        "Gap",
        "ProducerSequence",
        "QueueAdapter",
        "QueueReceiver",
        "QueueStatistics",
        "Receipt",
        "Received",
        "StreamMapper",
        "adapter_names",
        "open_adapter",
        "read_options",
    },
    "headrace.balancer": {
        "Balancer",
        "Placement",
        "StreamQueueMapper",
        "average",
        "average_allocation",
        "balancer_names",
        "best_fit_fixed",
        "best_fit_live",
        "find_balancer",
        "homes",
        "lease_count",
        "ring",
        "static",
        "sticky_allocation",
    },
}
HEAVY = {"blockbuster", "click", "google.protobuf", "grpc", "lmdb", "pytest", "rich", "sqlalchemy", "sqlite3"}


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_these(package: str):
    module = importlib.import_module(package)
    assert set(module.__all__) == PUBLIC[package]
    assert list(module.__all__) == sorted(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_type_checkers_see_the_public_names_where_they_are_imported_from():
    tree = ast.parse(Path(str(headrace.__file__)).read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen.keys() == PUBLIC["headrace"]
    for name, module in seen.items():
        assert getattr(importlib.import_module(str(module)), str(name)) is getattr(headrace, str(name))


@pytest.mark.parametrize("package", PUBLIC)
def test_importing_loads_nothing_heavy(package: str):
    script = f"import sys, {package}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert package in loaded
    assert HEAVY.intersection(loaded) == set()


def test_using_the_vocabulary_loads_nothing_heavy():
    script = (
        "import sys\n"
        "from headrace import Event, EventBatch, StreamId\n"
        "made = EventBatch.of(StreamId('n', 'k'), [b'x', Event(b'y', timestamp_us=1)])\n"
        "assert EventBatch.decode(made.encoded).events() == made.events()\n"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert HEAVY.intersection(loaded) == set()
