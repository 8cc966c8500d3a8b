"""Every block of code in the documents is run by a test. A block that cannot be run is named here, with the reason."""

from collections.abc import Iterator

import click
import pytest

from headrace.cli.main import cli
from tests.documents.reader import CodeBlock, code_blocks
from tests.documents.test_pages import FOLLOWED
from tests.plain_english import REPOSITORY

PAGES = sorted(
    page.relative_to(REPOSITORY).as_posix()
    for page in (REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").glob("*.md"))
)
EXAMPLES = "tests/documents/test_examples.py"
RUN_BY = {
    "README.md": ("tests/test_readme.py", 13),
    "docs/adapters.md": (EXAMPLES, 2),
    "docs/client.md": ("tests/client/test_client_docs.py, " + EXAMPLES, 4),
    "docs/configuration.md": (EXAMPLES, 1),
    "docs/consuming.md": ("tests/client/test_consuming_documented.py", 4),
    "docs/dashboard.md": (EXAMPLES, 2),
    "docs/effects.md": ("tests/effects/test_effects_docs.py, " + EXAMPLES, 10),
    "docs/first-minutes.md": ("tests/cli/test_first_minutes.py", 6),
    "docs/frameworks.md": ("tests/frameworks/test_frameworks_docs.py", 10),
    "docs/from-celery.md": ("tests/documents/test_other_systems.py", 4),
    "docs/from-kafka.md": ("tests/documents/test_other_systems.py", 2),
    "docs/from-nats.md": ("tests/documents/test_other_systems.py", 2),
    "docs/from-orleans.md": ("tests/documents/test_other_systems.py", 2),
    "docs/from-redis-streams.md": ("tests/documents/test_other_systems.py", 2),
    "docs/grpc.md": ("tests/silo/services/test_grpc_docs.py, tests/silo/services/test_grpc_conversation.py", 23),
    "docs/kafka.md": (f"{EXAMPLES}, tests/adapters/kafka/test_kafka_guide.py, tests/spark/test_kafka_connector.py", 5),
    "docs/operating-a-cluster.md": (EXAMPLES, 7),
    "docs/payloads.md": ("tests/silo/test_payload_docs.py", 3),
    "docs/postgres.md": (EXAMPLES, 2),
    "docs/redis.md": ("tests/adapters/redis/test_redis_guide.py", 5),
    "docs/security.md": (EXAMPLES, 6),
    "docs/spark.md": ("tests/spark/test_spark_guide.py", 18),
    "docs/testing.md": ("tests/testing/test_testing_page.py", 5),
    "docs/top.md": ("tests/cli/top/test_top.py", 2),
    "docs/tracing.md": (EXAMPLES, 3),
}
"""The tests that run the blocks of a page, and the number of its blocks: with a new block, extend the test."""
NOT_RUN = {
    "docs/frameworks.md": {
        "$ uvicorn shop:app": "the test runs the same server on a free port, and sends the same request",
        "uvicorn shop:app --workers": "tests/faults/test_worker_kills.py runs workers",
    },
    "docs/from-orleans.md": {"[ImplicitStreamSubscription": "C#, which needs .NET"},
    "docs/grpc.md": {
        "alias ask=": "grpcurl is not a package of Debian; the test makes the same calls",
        "mkdir -p headrace/proto/v1": "the tests generate the code with grpcio-tools",
    },
    "docs/spark.md": {
        "spark-submit": "it needs a cluster of Spark; tests/spark/test_standalone_cluster.py starts one",
        "pip install --target": "it needs a package index",
        **dict.fromkeys(
            [f"headrace pipeline {job}" for job in ("archive", "replay", "rollup", "audit")],
            "tests/spark runs each job and command on data of its own; the options are checked below",
        ),
        "headrace demo": "tests/cli/test_demo.py runs the demo",
    },
    "docs/testing.md": {
        "ship handled other": "what a failed test prints; tests/testing/test_provider.py checks such messages",
        "schemas/order.json: the change": "what a failed test prints; tests/testing/test_schemas.py checks such",
    },
    "docs/top.md": {
        "headrace top  localhost": "the picture of a screen",
        "$ headrace top": "it runs until a key is pressed; the test types",
    },
    "docs/tracing.md": {"$ pip install": "it needs a package index"},
}
"""Blocks that no test runs, by their first words, and the reason."""
BLOCKS = [block for page in PAGES for block in code_blocks(page)]


def reason_not_run(block: CodeBlock) -> str:
    reasons = NOT_RUN.get(block.page, {})
    return next((reason for words, reason in reasons.items() if block.text.startswith(words)), "")


def test_every_block_is_run_by_a_test_or_has_a_reason():
    """The number of blocks of each page is written down, so that a new one is seen."""
    found = {page: sum(block.page == page for block in BLOCKS) for page in PAGES}
    with_blocks = {page: count for page, count in found.items() if count and page not in FOLLOWED}
    assert with_blocks == {page: count for page, (_, count) in RUN_BY.items()}
    not_run = [block for block in BLOCKS if reason_not_run(block)]
    assert len(not_run) == sum(len(reasons) for reasons in NOT_RUN.values())
    print(f"{len(BLOCKS)} blocks, {len(not_run)} of them not run")


def test_the_tests_exist_that_run_the_blocks():
    for page, (tests, _) in RUN_BY.items():
        for test in tests.split(", "):
            text = (REPOSITORY / test).read_text(encoding="utf-8")
            assert page in text or page.rpartition("/")[2] in text, (page, test)


def commands() -> Iterator[tuple[str, list[str]]]:
    """The calls of `headrace` in the documents, also in indented lines, and where they are."""
    for block in BLOCKS:
        for line in block.text.replace("\\\n", " ").splitlines():
            if block.language == "sh" and line.startswith("headrace "):
                yield f"{block.page}:{block.line}", line.partition(" #")[0].split()[1:]
    for page in PAGES:
        text = (REPOSITORY / page).read_text(encoding="utf-8").replace("\\\n", " ")
        for number, line in enumerate(text.splitlines(), 1):
            stripped = line.strip().removeprefix("$ ").partition(" #")[0].partition("|")[0].partition("   ")[0]
            if line.startswith(("    headrace ", "$ headrace ")):
                yield f"{page}:{number}", stripped.split()[1:]


def fault_of_call(words: list[str]) -> str:
    """Return the word of a call that the command line does not know, "" for none."""
    command: click.Command = cli
    context = click.Context(command)
    for word in words:
        if word.startswith("--"):
            if isinstance(command, click.Group):
                return ""  # a group that does something without a command
            names = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
            if word.partition("=")[0] not in {*names, "--help", "--version"}:
                return word
        elif isinstance(command, click.Group):
            found = command.get_command(context, word)
            if found is None:
                return word
            command = found
    return ""


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_that_are_named_exist(page: str):
    faults = {where: fault_of_call(words) for where, words in commands() if where.startswith(f"{page}:")}
    assert {where: fault for where, fault in faults.items() if fault} == {}
