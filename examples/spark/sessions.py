"""Puts the views of each user into sessions: views that are at most half an hour apart. A session comes out once, when
it is over.

``python examples/spark/sessions.py --broker localhost:9092``
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from spark_integration import stateful
from statemgr import JobConfig

GAP_MS = 30 * 60_000


class Sessions(StatefulProcessor):
    """Puts the views of a user into sessions, and yields a session when it is over. Views may come in any order."""

    def init(self, handle):
        self.handle = handle
        self.open = handle.getMapState("open", "last bigint", "first bigint, views bigint")

    def handleInputRows(self, key, rows, timerValues):
        for row in rows:
            first = last = row.ms
            views = 1
            for (end,), (start, count) in list(self.open.iterator()):
                if start - GAP_MS <= row.ms <= end + GAP_MS:  # the view extends this session, or joins two
                    self.open.removeKey((end,))
                    self.handle.deleteTimer(end + GAP_MS)
                    first, last, views = min(first, start), max(last, end), views + count
            self.open.updateValue((last,), (first, views))
            self.handle.registerTimer(last + GAP_MS)
        yield from ()

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        last = expiredTimerInfo.getExpiryTimeInMs() - GAP_MS
        first, views = self.open.getValue((last,))
        self.open.removeKey((last,))
        yield Row(user=key[0], first=first, last=last, views=views)


def sessions(spark: SparkSession, broker: str, topic: str, config: JobConfig):
    """The sessions that are over: user, first, last, views. A view may come up to ten minutes late."""

    def views(starting_offsets: str) -> DataFrame:
        return (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", broker)
            .option("subscribe", topic)
            .option("startingOffsets", starting_offsets)
            .load()
            .select(F.from_json(F.col("value").cast("string"), "user string, at timestamp").alias("view"))
            .select("view.user", "view.at", F.unix_millis("view.at").alias("ms"))
            .where("ms IS NOT NULL")
            .withWatermark("at", "10 minutes")
        )

    return (
        stateful(views, "user", config=config)
        .transformWithState(Sessions(), "user string, first bigint, last bigint, views bigint", "Append", "EventTime")
        .withColumns({name: F.timestamp_millis(name) for name in ("first", "last")})
    )


def main(local) -> None:
    """Send a few rows, and print what comes out."""
    topic = local.topic("views")
    times = [("ann", "10:00"), ("ann", "10:40"), ("bob", "10:10"), ("ann", "10:20"), ("ann", "11:15"), ("bob", "15:00")]
    local.send(topic, [{"user": user, "at": f"2024-01-01T{time}:00Z"} for user, time in times])
    query = sessions(local.spark, local.broker, topic, local.config("sessions")).writeStream.format("console").start()
    query.processAllAvailable()  # ann's two sessions and bob's first one are over
    query.stop()


if __name__ == "__main__":
    from local import Local

    main(Local.from_arguments("sessions"))
