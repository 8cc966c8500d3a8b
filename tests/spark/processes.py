"""The processes that Spark makes: how a JVM and a Python are to start, and whether a process is left."""

from pathlib import Path

import pyspark

START_SOON = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
LOG_SETTINGS = (Path(__file__).parent / "log4j2.properties").as_uri()  # a path with a space would be two options
JAVA_OPTIONS = " ".join((*START_SOON, f"-Dlog4j2.configurationFile={LOG_SETTINGS}"))
"""Options of a JVM that starts quickly and logs little."""


def make_home(folder: Path) -> Path:
    """Make a SPARK_HOME that takes Python packages from where they are installed.

    Spark takes its own from archives, and each of its Python processes would compile them anew.
    """
    installed = Path(pyspark.__file__).parent
    home = folder / "home"
    (home / "python" / "lib").mkdir(parents=True)
    for part in ("bin", "jars", "sbin"):
        (home / part).symlink_to(installed / part)
    for archive in (installed / "python" / "lib").glob("*.zip"):
        (home / "python" / "lib" / archive.name).symlink_to(installed.parent)
    return home


def session_members(session: int) -> list[int]:
    """The living processes of a session of the operating system."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found
