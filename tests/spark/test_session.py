"""Sessions that `headrace.pipeline.session` makes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
from headrace.pipeline.session import own_session, session

os.environ["PYSPARK_SUBMIT_ARGS"] = "--driver-java-options -XX:TieredStopAtLevel=1 pyspark-shell"
first = session("test", "local[1]")
for spark in (first, own_session(first)):
    print(*spark.read.format("headrace").option("data", "data").load().columns[:2])
"""


@pytest.mark.slow
def test_sessions_know_the_format_if_the_path_of_their_python_has_a_space(spark_environment: None, tmp_path: Path):
    (tmp_path / "x y").symlink_to(sys.prefix)
    python = tmp_path / "x y" / "bin" / "python"
    environment = {**os.environ, "PYSPARK_PYTHON": str(python)}
    done = subprocess.run(
        [python, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "namespace key\n" * 2), done.stderr
