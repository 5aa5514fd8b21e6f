"""A query on executors in their own processes, for the soak: ``soak_job.py '{…}'``.

The query counts rows per key, writes down what it does (:mod:`tests.clusters.recording`), and sends the changes to a
topic in the publishing transaction. If a typed error ends it, the last line of its output is the error's class.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from spark_integration import StateContext, StatefulQuery
from statemgr import JobConfig, Store
from statemgr.errors import StatemgrError
from statemgr_tools.dev import connector_jars
from tests.clusters.checker import Commit
from tests.clusters.recording import LAST, Recorder, put, text

JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


class Counting:
    """Counts rows per key. The value of a row is its name."""

    def __init__(self, log: str) -> None:
        self.log = log

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Write down an attempt, then make it."""
        counts: Counter[str] = Counter()
        inputs: list[str] = []
        for batch in batches:
            counts.update(key.decode() for key in batch.column("key").to_pylist())
            inputs += [value.decode() for value in batch.column("value").to_pylist()]
        if not inputs:
            return
        store, name = stores["totals"], f"{context.sequence}-{secrets.token_hex(5)}"
        before = {key: text(store.get(key.encode())) for key in counts}
        after = {key: str(int(before[key] or 0) + count) for key, count in counts.items()}
        outputs = {key: f"{context.task}|{name} {key}={value}" for key, value in after.items()}
        commit = Commit(
            name=name,
            task=context.task,
            base=text(store.get(LAST)),
            inputs=inputs,
            reads=before,
            writes=after,
            outputs=[*outputs.values()],
            began=time.monotonic(),
        )
        Recorder(Path(self.log)).commit(commit)
        put(store, commit)
        yield pa.RecordBatch.from_pydict({"key": [*outputs], "value": [*outputs.values()]})


def main(order: str) -> None:
    """Run to the end of the input, or until killed."""
    given = json.loads(order)
    job = JobConfig.from_mapping(given["config"])
    settings = {
        "spark.jars": ",".join(str(jar) for jar in connector_jars()),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": given["scratch"],
        "spark.driver.extraJavaOptions": JAVA,
        "spark.executor.extraJavaOptions": JAVA,
        "spark.sql.shuffle.partitions": "4",
        **given["settings"],
    }
    builder = SparkSession.builder.master("local-cluster[2,1,1024]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")

    def rows(starting_offsets: str) -> DataFrame:
        return (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", job.get("kafka.bootstrap.servers"))
            .option("subscribe", given["topic"])
            .option("startingOffsets", starting_offsets)
            .option("maxOffsetsPerTrigger", given["per_batch"])
            .load()
        )

    query = StatefulQuery(job).input(rows).key_by("key").process(Counting(given["log"]), "key string, value string")
    writer = query.writeStream.format("kafka").option("topic", given["output"]).trigger(**given["trigger"])
    try:
        writer.start().awaitTermination()
    except StatemgrError as error:
        print(type(error).__name__, flush=True)
        raise


if __name__ == "__main__":
    main(sys.argv[1])
