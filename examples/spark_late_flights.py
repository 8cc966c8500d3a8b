"""Put late flights into streams of their own, one for each carrier: a streaming query from streams into streams.

    headrace demo --data demo-data
    python examples/spark_late_flights.py demo-data late-checkpoint
    headrace subscribe 'late-flights/*' --data demo-data --from earliest

It ends when all stored events are done; with a third argument, `follow`, it waits for more. The next run continues from
its checkpoint, and each late flight is published once.
"""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as everybody writes it)

from headrace.pipeline.session import session

LATE_MINUTES = 60


def flights(spark: SparkSession, data: str) -> DataFrame:
    schema = "carrier STRING, flight INT, origin STRING, dest STRING, tailnum STRING, dep_delay INT"
    source = spark.readStream.format("headrace").option("data", data).option("namespace", "flights")
    decoded = source.option("decode", "json").option("payloadSchema", schema)
    return decoded.option("columns", "value,timestamp").load()


def late(departures: DataFrame) -> DataFrame:
    """Return events: the key is the carrier, the payload describes the flight, the timestamp is the departure."""
    payload = F.to_json(F.struct("value.flight", "value.origin", "value.dest", "value.tailnum", "value.dep_delay"))
    return departures.where(F.col("value.dep_delay") >= LATE_MINUTES).select(
        F.col("value.carrier").alias("key"), payload.alias("payload"), "timestamp"
    )


def main() -> None:
    data, checkpoint, *follow = sys.argv[1:]
    spark = session("late flights")
    writer = late(flights(spark, data)).writeStream.format("headrace").option("data", data)
    writer = writer.option("namespace", "late-flights").option("checkpointLocation", checkpoint)
    query = (writer.trigger(processingTime="1 second") if follow else writer.trigger(availableNow=True)).start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
