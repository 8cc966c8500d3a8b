"""The processes that Spark makes: how a JVM is to start, and whether one is left."""

from pathlib import Path

START_SOON = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
JAVA_OPTIONS = " ".join((*START_SOON, f"-Dlog4j2.configurationFile=file:{Path(__file__).parent}/log4j2.properties"))
"""Of a JVM that starts soon, and says little."""


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
