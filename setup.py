"""The repository's folders are the subpackages of `headrace`: `streams/` is `headrace.streams`, and `front_door/` is
`headrace` itself. It has another name in the checkout: a folder `headrace` there would hide the installed package.

The one exception is `pyspark_headrace`, a name by which Spark finds the format "headrace".

Everything else about the package is in pyproject.toml, which has no way to say this without a list of every folder.
"""

from setuptools import find_packages, setup

FOLDERS = (
    "proto",
    "streams",
    "store",
    "effects",
    "adapters",
    "balancer",
    "client",
    "agents",
    "server",
    "silo",
    "pipeline",
    "frameworks",
    "cli",
    "testing",
)


def packages(folder: str) -> list[str]:
    return [f"headrace.{folder}", *(f"headrace.{folder}.{name}" for name in find_packages(folder))]


setup(
    packages=["headrace", *(name for folder in FOLDERS for name in packages(folder))],
    py_modules=["pyspark_headrace"],
    package_dir={"headrace": "front_door", **{f"headrace.{folder}": folder for folder in FOLDERS}},
)
