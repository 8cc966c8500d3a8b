"""The code generated from proto/ is the generator's current output."""

import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).parent.parent / "proto"
SOURCES = sorted(path.relative_to(PROTO) for path in PROTO.rglob("*.proto"))


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generator's output, made as `make generate` makes it."""
    tree = tmp_path_factory.mktemp("generated")
    (tree / "source").mkdir()
    (tree / "source" / "headrace").mkdir()
    (tree / "source" / "headrace" / "proto").symlink_to(PROTO)
    names = [f"headrace/proto/{source}" for source in SOURCES]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Isource", "--python_out=.", "--mypy_out=.", *names]
    path = Path(sys.executable).parent
    subprocess.run(command, cwd=tree, env={"PATH": f"{path}:/usr/bin:/bin"}, check=True, capture_output=True)
    return tree / "headrace" / "proto"


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("suffix", ["_pb2.py", "_pb2.pyi"])
def test_generated_code_is_current(generated: Path, source: Path, suffix: str):
    name = source.with_name(source.stem + suffix)
    made = (generated / name).read_text()
    if suffix == "_pb2.pyi":
        made = made.replace("\nfrom headrace.proto.v1 import", "\nfrom . import")
    assert (PROTO / name).read_text() == made, "run `make generate`, and commit what it makes"
