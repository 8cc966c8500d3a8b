"""A class name stands for one class, in the product and in the benchmarks."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "adapters", "agents", "balancer", "benchmarks", "cli", "client", "effects", "frameworks", "front_door", "pipeline",
    "server", "silo", "store", "streams", "testing",
)  # fmt: skip

VAGUE = {
    "Attachment", "Behind", "Call", "Clustering", "Consumers", "Conversation", "Delivered", "Events", "Guard",
    "Held", "Holdings", "Kind", "Limits", "Link", "Management", "Method", "Owner", "Owners", "Parts",
    "Placements", "Plan", "Question", "Record", "Rejected", "SomeEvents", "State", "Term", "Trouble", "Usage",
    "World",
}  # fmt: skip
"""Words that say too little without their module. `ServiceCall` says more than `Call`."""


@pytest.mark.long
def test_no_two_public_classes_share_a_name_and_none_is_vague() -> None:
    files = defaultdict[str, list[str]](list)
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files[node.name].append(str(file.relative_to(ROOT)))
    assert len(files) > 500
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
    assert files.keys() & VAGUE == set()
