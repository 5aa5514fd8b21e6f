"""Counts the views of each page in windows of a minute. A window comes out once, when it is over.

``python examples/spark/windowed_count.py --broker localhost:9092``
"""

from __future__ import annotations

from collections import Counter

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from spark_integration import stateful
from statemgr import JobConfig

MINUTE_MS = 60_000


class WindowedCount(StatefulProcessor):
    """Counts the views of a page in windows of a minute, and yields a window when it is over."""

    def init(self, handle):
        self.handle = handle
        self.counts = handle.getMapState("counts", "end bigint", "views bigint")

    def handleInputRows(self, key, rows, timerValues):
        for end, views in Counter(row.ms - row.ms % MINUTE_MS + MINUTE_MS for row in rows).items():
            before = self.counts.getValue((end,))
            self.counts.updateValue((end,), (views + before[0] if before else views,))
            self.handle.registerTimer(end)  # fires when the watermark has reached the end of the window
        yield from ()

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        end = expiredTimerInfo.getExpiryTimeInMs()
        (views,) = self.counts.getValue((end,))
        self.counts.removeKey((end,))
        yield Row(page=key[0], end=end, views=views)


def windows(spark: SparkSession, broker: str, topic: str, config: JobConfig):
    """The windows that are over: page, end, views. A view may come up to ten seconds late."""

    def views(starting_offsets: str) -> DataFrame:
        return (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", broker)
            .option("subscribe", topic)
            .option("startingOffsets", starting_offsets)
            .load()
            .select(F.from_json(F.col("value").cast("string"), "page string, at timestamp").alias("view"))
            .select("view.page", "view.at", F.unix_millis("view.at").alias("ms"))
            .where("ms IS NOT NULL")
            .withWatermark("at", "10 seconds")
        )

    return (
        stateful(views, "page", config=config)
        .transformWithState(WindowedCount(), "page string, end bigint, views bigint", "Append", "EventTime")
        .select("page", F.timestamp_millis("end").alias("end"), "views")
    )


def main(local) -> None:
    """Send a few rows, and print what comes out."""
    topic = local.topic("views")
    times = [("/", "10:00:05"), ("/", "10:00:40"), ("/help", "10:00:41"), ("/", "10:01:02"), ("/", "10:00:59")]
    local.send(topic, [{"page": page, "at": f"2024-01-01T{time}Z"} for page, time in [*times, ("/", "10:05:00")]])
    query = windows(local.spark, local.broker, topic, local.config("windows")).writeStream.format("console").start()
    query.processAllAvailable()  # the windows up to 10:02 are over; a query that goes on would call awaitTermination
    query.stop()


if __name__ == "__main__":
    from local import Local

    main(Local.from_arguments("windowed-count"))
