"""The protocol is documented and breaks no client: buf says so, as `make lint` asks it, and would say otherwise."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).parent.parent / "proto"
BUF = Path(sys.executable).parent / "buf"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the protocol, under the name it is imported by."""
    copy = tmp_path / "headrace" / "proto" / "v1"
    copy.mkdir(parents=True)
    for source in (PROTO / "v1").glob("*.proto"):
        shutil.copy(source, copy)
    return tmp_path


def buf(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(BUF), *arguments, "--config", str(PROTO / "buf.yaml")]
    environment = {**os.environ, "BUF_CACHE_DIR": str(tree / "cache")}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=60, check=False)


def breaking(tree: Path) -> subprocess.CompletedProcess[str]:
    return buf(tree, "breaking", "--against", str(PROTO / "v1.binpb"))


def change(tree: Path, file: str, pattern: str, replacement: str) -> None:
    path = tree / "headrace" / "proto" / "v1" / file
    text, count = re.subn(pattern, replacement, path.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1, f"{file} has no {pattern!r} any more"
    path.write_text(text)


def test_protocol_is_in_style_and_documented(tree: Path):
    asked = buf(tree, "lint")
    assert (asked.returncode, asked.stdout) == (0, ""), asked.stderr


def test_field_without_a_comment_is_refused(tree: Path):
    change(tree, "publisher.proto", r"^message Receipt \{$", "message Receipt {\n  bool bare = 9;\n")
    asked = buf(tree, "lint")
    assert asked.returncode == 100
    assert 'Field "bare" should have a non-empty comment' in asked.stdout


def test_protocol_breaks_no_client(tree: Path):
    asked = breaking(tree)
    assert (asked.returncode, asked.stdout) == (0, ""), asked.stderr


BREAKING = {
    "another type of the same wire format": ("publisher.proto", r"uint32 status = 1;", "int64 status = 1;"),
    "another type": ("consumer.proto", r"uint32 heartbeat_ms = 3;", "string heartbeat_ms = 3;"),
    "another number": ("consumer.proto", r"bool up_to = 4;", "bool up_to = 15;"),
    "another name": ("events.proto", r"uint32 attempt = 18;", "uint32 attempts = 18;"),
    "a field less": ("consumer.proto", r"^  bool close = 4;\n", ""),
    "one where there were many": ("events.proto", r"repeated fixed32 sizes", "fixed32 sizes"),
    "a value less": ("subscriptions.proto", r"^  MODE_BOUND = 2;\n", ""),
    "a method less": ("consumer.proto", r"^  rpc Pull\(.*\n", ""),
    "another request": ("consumer.proto", r"rpc Pull\(PullRequest\)", "rpc Pull(AcknowledgeRequest)"),
    "no stream": ("consumer.proto", r"returns \(stream SubscribeResponse\)", "returns (SubscribeResponse)"),
    "another package": ("events.proto", r"package headrace.v1;", "package headrace.v2;"),
}
ADDITIVE = {
    "a field": ("publisher.proto", r"^message Receipt \{$", "message Receipt {\n  // New.\n  bool fresh = 100;\n"),
    "a value": ("subscriptions.proto", r"^  MODE_BOUND = 2;$", "  MODE_BOUND = 2;\n  // New.\n  MODE_FRESH = 100;\n"),
    "a method": ("cluster.proto", r"^(  rpc DrainSilo)(.*)$", r"\1\2\n  // New.\n\1Again\2"),
    "a message": ("cluster.proto", r"\Z", "\n// New.\nmessage Fresh {}\n"),
    "a comment": ("cluster.proto", r"^message Silo \{$", "// Said better.\nmessage Silo {"),
}


@pytest.mark.parametrize("what", BREAKING)
def test_breaking_change_is_refused(tree: Path, what: str):
    file, pattern, replacement = BREAKING[what]
    change(tree, file, pattern, replacement)
    asked = breaking(tree)
    assert (asked.returncode, asked.stderr) == (100, "")
    assert "headrace/proto/v1/" in asked.stdout


@pytest.mark.parametrize("what", ADDITIVE)
def test_additive_change_is_accepted(tree: Path, what: str):
    file, pattern, replacement = ADDITIVE[what]
    change(tree, file, pattern, replacement)
    asked = breaking(tree)
    assert (asked.returncode, asked.stdout) == (0, ""), asked.stderr
