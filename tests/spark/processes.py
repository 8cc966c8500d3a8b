"""The processes that Spark makes: how a JVM is to start, and whether one is left."""

from pathlib import Path

START_SOON = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
LOG_SETTINGS = (Path(__file__).parent / "log4j2.properties").as_uri()  # a path with a space would be two options
JAVA_OPTIONS = " ".join((*START_SOON, f"-Dlog4j2.configurationFile={LOG_SETTINGS}"))
"""Options of a JVM that starts quickly and logs little."""


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
