"""How late each carrier's flights left New York, by the hour they were scheduled for: a batch over the demo's streams.

    headrace demo --data demo-data
    python examples/spark_delays.py demo-data

or `spark-submit examples/spark_delays.py demo-data`.
"""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as everybody writes it)

from headrace.pipeline.session import session


def flights(spark: SparkSession, data: str) -> DataFrame:
    """Return one row for each flight, with the fields that this job needs."""
    source = spark.read.format("headrace").option("data", data).option("namespace", "flights")
    decoded = source.option("decode", "json").option("payloadSchema", "carrier STRING, hour INT, dep_delay INT")
    return decoded.option("columns", "value").load().select("value.*")


def delays(departures: DataFrame) -> DataFrame:
    """Count and average by carrier and hour. A cancelled flight has no delay: it counts as scheduled only."""
    return departures.groupBy("carrier", "hour").agg(
        F.count("*").alias("scheduled"),
        F.count("dep_delay").alias("departed"),
        F.round(F.avg("dep_delay"), 1).alias("minutes_late"),
    )


def main() -> None:
    data = sys.argv[1] if len(sys.argv) > 1 else "demo-data"
    spark = session("delays")  # SparkSession.builder.getOrCreate() does as well: this one finds Java
    print("carrier,hour,scheduled,departed,minutes_late")
    for row in delays(flights(spark, data)).orderBy("carrier", "hour").collect():
        late = "" if row.minutes_late is None else row.minutes_late
        print(f"{row.carrier},{row.hour},{row.scheduled},{row.departed},{late}")
    spark.stop()


if __name__ == "__main__":
    main()
