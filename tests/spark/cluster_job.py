"""A job on executors in processes of their own, for ``test_cluster``: ``cluster_job.py config.json topic location``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from spark_integration import StatefulQuery
from statemgr import JobConfig
from statemgr_tools.dev import connector_jars
from tests.spark.conftest import OUTPUT, count


def main(config: str, topic: str, location: str, scratch: str) -> None:
    """Count everything on the topic and print the output's rows as JSON."""
    job = JobConfig.from_mapping(json.loads(Path(config).read_text()))
    spark = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.jars", ",".join(str(jar) for jar in connector_jars()))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.local.dir", scratch)
        .config("spark.driver.extraJavaOptions", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")
        .config("spark.executor.extraJavaOptions", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    outputs: list[object] = []

    def write(rows: DataFrame, sequence: int) -> None:
        outputs.append([sequence, sorted(list(row) for row in rows.collect())])

    def rows(starting_offsets: str) -> DataFrame:
        return (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", job.get("kafka.bootstrap.servers"))
            .option("subscribe", topic)
            .option("startingOffsets", starting_offsets)
            .option("maxOffsetsPerTrigger", 60)
            .load()
        )

    query = StatefulQuery(job).input(rows).key_by("key").process(count, OUTPUT).output(write)
    query.trigger(availableNow=True).option("checkpointLocation", location).start().awaitTermination()
    executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
    spark.stop()
    print(json.dumps({"executors": executors, "outputs": outputs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
