"""A query of Spark's transformWithState moves to statemgr, and back: ``python examples/from-transform-with-state/run.py
--broker localhost:9092``.

One class counts rows by key in all three queries. Each query begins with the state and the offsets of the one before.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from spark_integration import register, stateful
from statemgr import JobConfig
from statemgr_tools.dev import connector_jars

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from steps import PARTITIONS, Example

OUTPUT = "key string, rows bigint"
PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class Counts(StatefulProcessor):
    """Counts the rows of a key. It runs on both engines as it is."""

    def init(self, handle):
        self.rows = handle.getValueState("rows", "rows bigint")

    def handleInputRows(self, key, rows, timerValues) -> Iterator[Row]:
        count = sum(1 for _ in rows) + (self.rows.get()[0] if self.rows.exists() else 0)
        self.rows.update((count,))
        yield Row(key=key[0], rows=count)

    def handleInitialState(self, key, initialState, timerValues) -> None:
        self.rows.update((initialState.rows,))

    def close(self):
        pass


os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
example = Example("transform-with-state")
spark = (
    SparkSession.builder.master("local[2]")
    .appName("from-transform-with-state")
    .config("spark.jars", ",".join(str(jar) for jar in connector_jars()))
    .config("spark.sql.streaming.stateStore.providerClass", PROVIDER)
    .config("spark.sql.shuffle.partitions", PARTITIONS)
    .config("spark.sql.warehouse.dir", str(example.work / "warehouse"))
    .config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")


def rows(starting_offsets: str) -> DataFrame:
    """The input, from offsets as Spark's option ``startingOffsets`` takes them."""
    stream = spark.readStream.format("kafka").option("kafka.bootstrap.servers", example.broker)
    stream = stream.option("subscribe", example.topic).option("startingOffsets", starting_offsets)
    return stream.load().selectExpr("cast(key as string) as key")


def on_spark(name: str, starting_offsets: str, initial: DataFrame | None = None) -> Path:
    """Run the class on Spark's own engine to the end of the input. Returns: its checkpoint location."""
    location = example.work / name
    groups = rows(starting_offsets).groupBy("key")
    frame = groups.transformWithState(
        Counts(), OUTPUT, "Update", "None", None if initial is None else initial.groupBy("key")
    )
    writer = frame.writeStream.outputMode("update").format("noop").trigger(availableNow=True)
    writer.option("checkpointLocation", location.as_uri()).start().awaitTermination()
    return location


def state_of(location: Path) -> DataFrame:
    """What a query on Spark's own engine has counted."""
    states = spark.read.format("statestore").option("stateVarName", "rows").load(location.as_uri())
    return states.selectExpr("key.key", "value.rows")


# 1. Spark's own engine counts the first half of the rows, and stops
example.send_half()
old = on_spark("spark", "earliest")
newest = max(int(file.name) for file in (old / "commits").glob("[0-9]*"))
offsets = (old / "offsets" / str(newest)).read_text().splitlines()[-1]
print(f"Spark's own engine stopped at {offsets}")

# 2. statemgr begins with its state and at its offsets, and counts the second half. The state is read from Spark's
#    checkpoint location, in the first batch and never again
example.send_half()
config = JobConfig.from_mapping(
    {
        "job.name": f"{example.name}-new",
        "job.tasks": PARTITIONS,
        "kafka.bootstrap.servers": example.broker,
        "blob.store.uri": (example.work / "blobs").as_uri(),
        "state.dir": str(example.work / "state"),
        "task.backup.factories": ["blob-store"],
        "task.restore.factories": ["blob-store"],
        "stores.counts.value.serde": "bytes",
    }
)
groups = stateful(lambda start: rows(offsets if start == "earliest" else start), "key", config=config)
frame = groups.transformWithState(Counts(), OUTPUT, "Update", "None", state_of(old).groupBy("key"))
writer = frame.writeStream.foreachBatch(lambda df, sequence: None).trigger(availableNow=True)
writer.option("checkpointLocation", (example.work / "location").as_uri()).start().awaitTermination()

# 3. and back: the same way, from the published checkpoint
example.send_half()
register(spark)
job = json.dumps(config.to_mapping())
published = spark.read.format("statemgr.state").options(config=job, stateVarName="rows").load()
current = spark.read.format("statemgr.checkpoints").options(config=job).load().where("current").first()
ends: dict[str, dict[str, int]] = {example.topic: {}}
for source, offset in current.input_offsets.items():
    ends[example.topic][source.rpartition("-")[2]] = offset
back = on_spark("back", json.dumps(ends), published.selectExpr("key.key", "value.rows"))

totals = {row.key: row.rows for row in state_of(back).collect()}
if totals != {f"key-{number}": 3 * example.each for number in range(example.keys)}:
    sys.exit(f"wrong totals: {dict(islice(totals.items(), 100))}")
print(f"{len(totals)} keys, and each has counted {3 * example.each} rows: on Spark's engine, with statemgr, and on")
print("Spark's engine again")
spark.stop()
