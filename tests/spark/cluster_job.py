"""A session with executors in their own processes: ``cluster_job.py '{"master": …, "settings": {…}}'``.

It reads orders from standard input, one line of JSON each, and answers each with a line of JSON on standard output.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from spark_integration import StatefulQuery
from statemgr import JobConfig
from statemgr_tools.dev import connector_jars
from tests.spark.conftest import OUTPUT
from tests.spark.faults import kill_driver_in, run_of_map_task

JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


def session(master: str, settings: dict[str, str]) -> SparkSession:
    """Start the session. Executors start as soon as the cluster has room for them."""
    defaults = {
        "spark.jars": ",".join(str(jar) for jar in connector_jars()),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": JAVA,
        "spark.executor.extraJavaOptions": JAVA,
        "spark.sql.shuffle.partitions": "4",
        # when an executor dies, do not wait long for it
        "spark.locality.wait": "100ms",
    }
    builder = SparkSession.builder.master(master)
    for name, value in (defaults | settings).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def named(text: str) -> Any:
    """Return the object that ``module:name`` names."""
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(module), name)


def run(spark: SparkSession, order: dict[str, Any]) -> dict[str, Any]:
    """Run a query to the end of its input."""
    config = JobConfig.from_mapping(order["config"])
    outputs: list[object] = []

    def write(rows: DataFrame, sequence: int) -> None:
        outputs.append([sequence, sorted(list(row) for row in rows.collect())])

    def rows(starting_offsets: str) -> DataFrame:
        if "files" in order:
            reader = spark.readStream.schema(order["schema"])
            return reader.parquet(order["files"])
        read = (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", config.get("kafka.bootstrap.servers"))
            .option("subscribe", order["topic"])
            .option("startingOffsets", starting_offsets)
            .option("maxOffsetsPerTrigger", order["per_batch"])
            .load()
        )
        return run_of_map_task(read, order["notes"]) if "notes" in order else read

    name, *arguments = order["process"]
    process: Callable[..., Any] = named(name)(*arguments) if arguments else named(name)
    output = named(order["output"])(*order["output_arguments"]) if "output" in order else write
    for key, value in order.get("conf", {}).items():
        spark.conf.set(key, value)
    if "kill" in order:
        kill_driver_in(order["kill"])
    query = StatefulQuery(config).input(rows).key_by(order.get("key", "key"))
    query = query.process(process, order.get("output_schema", OUTPUT)).output(output)
    running = query.trigger(availableNow=True).option("checkpointLocation", order["location"]).start()
    running.awaitTermination()
    return {"outputs": outputs, "reports": [report.to_dict() for report in running.recentBatches]}


def read(spark: SparkSession, order: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of a SQL query."""
    return {"rows": [list(row) for row in spark.sql(order["sql"]).collect()]}


def executors(spark: SparkSession, order: dict[str, Any]) -> dict[str, Any]:
    """Wait until the wanted number of executors run. Return their number."""
    status = spark.sparkContext._jsc.sc()  # type: ignore[union-attr]
    deadline = time.monotonic() + order["timeout"]
    while (count := status.getExecutorMemoryStatus().size() - 1) != order["wanted"] and time.monotonic() < deadline:
        time.sleep(0.1)
    return {"executors": count}


def main(text: str) -> None:
    """Answer orders until the input ends."""
    # keep Spark's own output off standard output
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = json.loads(text)
    spark = session(start["master"], start["settings"])
    kinds = {"run": run, "read": read, "executors": executors}
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = kinds[order["kind"]](spark, order)
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
        print(json.dumps(answer, default=str), file=answers, flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
