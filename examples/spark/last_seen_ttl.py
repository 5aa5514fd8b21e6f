"""Reports a device when it is heard from for the first time, and again after a silence. The state forgets devices that
are silent.

``python examples/spark/last_seen_ttl.py --broker localhost:9092``
"""

from __future__ import annotations

import time

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from spark_integration import stateful
from statemgr import JobConfig


class Devices(StatefulProcessor):
    """Reports a device that is heard from for the first time, or again after it was silent for the TTL."""

    def __init__(self, ttl_ms):
        self.ttl_ms = ttl_ms

    def init(self, handle):
        self.last = handle.getValueState("last_seen", "at timestamp", self.ttl_ms)

    def handleInputRows(self, key, rows, timerValues):
        newest = max(row.at for row in rows)
        if not self.last.exists():  # never seen, or forgotten
            yield Row(device=key[0], back_at=newest)
        self.last.update((newest,))  # the TTL begins again


def devices(spark: SparkSession, broker: str, topic: str, config: JobConfig, ttl_ms: int):
    """The devices that are new or back: device, back_at."""

    def signals(starting_offsets: str) -> DataFrame:
        return (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", broker)
            .option("subscribe", topic)
            .option("startingOffsets", starting_offsets)
            .load()
            .select(F.from_json(F.col("value").cast("string"), "device string").alias("signal"), "timestamp")
            .select("signal.device", F.col("timestamp").alias("at"))
        )

    return stateful(signals, "device", config=config).transformWithState(
        Devices(ttl_ms), "device string, back_at timestamp", "Update", "ProcessingTime"
    )


def main(local) -> None:
    """Send a few rows, and print what comes out."""
    topic = local.topic("signals")
    query = (
        devices(local.spark, local.broker, topic, local.config("devices"), ttl_ms=15_000)
        .writeStream.format("console")
        .start()
    )
    for pause_seconds in (0, 0, 20):  # new; not reported; back
        time.sleep(pause_seconds)
        local.send(topic, [{"device": "thermometer"}])
        query.processAllAvailable()
    query.stop()


if __name__ == "__main__":
    from local import Local

    main(Local.from_arguments("last-seen"))
