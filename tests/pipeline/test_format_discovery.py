"""The formats that Spark's search finds in Pythons that lack a package.

The tests search as Spark's own worker does: see pyspark/sql/worker/lookup_data_sources.py.
"""

import subprocess
import sys

import pytest

LOOK = """
import importlib, pickle, sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # an import of it fails
module = importlib.import_module("pyspark_headrace")
if not hasattr(module, "DefaultSource"):
    sys.exit("no format")
from pyspark.sql.datasource import DataSource
assert issubclass(module.DefaultSource, DataSource)
assert pickle.loads(pickle.dumps(module.DefaultSource)) is module.DefaultSource
print(module.DefaultSource.name())
"""


def look(*missing: str, then: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LOOK + then, *missing], check=False, capture_output=True, text=True)


def test_the_format_is_the_source():
    found = look(then="print(module.DefaultSource.__module__)")
    assert (found.stdout.split(), found.stderr) == (["headrace", "headrace.pipeline.source"], "")


def test_without_spark_there_is_no_format_and_no_failure():
    assert look("pyspark").stderr == "no format\n"


USE = """
for use, given in [
    ("schema", {}),
    ("reader", {"schema": None}),
    ("streamReader", {"schema": None}),
    ("writer", {"schema": None, "overwrite": False}),
    ("streamWriter", {"schema": None, "overwrite": False}),
]:
    try:
        getattr(module.DefaultSource({}), use)(**given)
    except ImportError as error:
        print(error)
"""


@pytest.mark.parametrize("missing", ["pyarrow", "headrace"])
def test_missing_package_is_named_however_the_format_is_used(missing: str):
    found = look(missing, then=USE)
    assert found.stderr == ""
    name, *said = found.stdout.splitlines()
    assert (name, len(said), len(set(said))) == ("headrace", 5, 1)
    assert said[0].startswith(f"format headrace cannot be used in {sys.executable}: ModuleNotFoundError: ")
    assert missing in said[0]
    assert said[0].endswith(": install 'headrace[spark]' there")


def test_the_module_loads_nothing_before_it_is_asked():
    script = "import sys, pyspark_headrace; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in loaded if name.startswith(("pyspark.", "headrace", "pyarrow", "numpy"))} == set()
