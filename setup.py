"""The repository's folders are the subpackages of the namespace `headrace`: `streams/` is `headrace.streams`.

The one exception is `pyspark_headrace`, a name by which Spark finds the format "headrace".

Everything else about the package is in pyproject.toml, which has no way to say this without a list of every folder.
"""

from setuptools import find_packages, setup

FOLDERS = ("streams", "adapters", "agents", "balancer", "benchmarks", "pipeline", "proto", "silo")


def packages(folder: str) -> list[str]:
    return [f"headrace.{folder}", *(f"headrace.{folder}.{name}" for name in find_packages(folder))]


setup(
    packages=[name for folder in FOLDERS for name in packages(folder)],
    py_modules=["pyspark_headrace"],
    package_dir={f"headrace.{folder}": folder for folder in FOLDERS},
)
