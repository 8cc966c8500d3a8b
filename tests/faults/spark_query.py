"""Two streaming queries in one process, to be killed: all events of a namespace go to Parquet, and into streams.

Arguments: the folder for checkpoints, Parquet and results, and where to read and to write, as Spark's options in JSON.
If the folder has a file STOP, the program ends when there is nothing more to read, and lists the arrived events in
RESULT.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headrace.pipeline.session import session

STOP, RESULT, STARTED = "stop", "result.json", "the queries run"
SOURCE, COPIES = "orders", "copies"
AT_ONCE = 300
"""Events of a micro-batch at most, so that there are many."""


def start(
    spark: SparkSession, folder: Path, source: Mapping[str, str], sink: Mapping[str, str]
) -> list[StreamingQuery]:
    def begin(name: str, form: str, columns: str, options: Mapping[str, str]) -> StreamingQuery:
        events = (
            spark.readStream.format("headrace")
            .options(**source)
            .options(namespace=SOURCE, columns=columns, maxEventsPerTrigger=str(AT_ONCE))
            .load()
        )
        written = events.writeStream.format(form).options(**options).queryName(name)
        return written.option("checkpointLocation", str(folder / f"checkpoint-{name}")).start()

    return [
        begin("parquet", "parquet", "key,payload", {"path": str(folder / "parquet")}),
        begin("streams", "headrace", "key,payload", {**sink, "namespace": COPIES}),
    ]


def finish(spark: SparkSession, folder: Path, queries: list[StreamingQuery], sink: Mapping[str, str]) -> None:
    for query in queries:
        query.processAllAvailable()
        query.stop()
    copies = spark.read.format("headrace").options(**sink).options(namespace=COPIES, columns="key,payload").load()
    arrived = {"parquet": listed(spark.read.parquet(str(folder / "parquet"))), "streams": listed(copies)}
    (folder / RESULT).write_text(json.dumps(arrived))


def listed(events: DataFrame) -> list[tuple[str, int]]:
    return sorted((str(row.key), int(bytes(row.payload))) for row in events.collect())


def main() -> None:
    folder, source, sink = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    spark = session("chaos", "local[2]")
    queries = start(spark, folder, source, sink)
    print(STARTED, flush=True)
    while not (folder / STOP).exists():
        if failed := next((query for query in queries if not query.isActive), None):
            raise RuntimeError(f"the query {failed.name} ended: {failed.exception()}")
        time.sleep(0.05)
    finish(spark, folder, queries, sink)
    spark.stop()


if __name__ == "__main__":
    main()
