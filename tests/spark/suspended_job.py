"""A query whose driver suspends itself between a publish and the output, for ``test_fenced_output``.

``suspended_job.py config.json topic directory rows``: the driver sends itself SIGSTOP right after the first
acknowledged publish. It has fetched its output rows by then (rows ``before``), or fetches them when it wakes up
(``after``). The sink overwrites a sequence's earlier output, as a sink without any protection does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from spark_integration import StatefulQuery, driver
from statemgr import JobConfig
from statemgr.errors import StatemgrError
from statemgr.phases import Phase, add_observer
from statemgr_tools.demo.pipeline import java_options
from statemgr_tools.dev import connector_jars
from tests.spark.conftest import OUTPUT
from tests.spark.test_outbox import large


def main(config: str, topic: str, directory: str, rows: str) -> None:
    """Run until the query ends. Print the sink's calls and the kind of error that ended the query."""
    job = JobConfig.from_mapping(json.loads(Path(config).read_text()))
    settings = {
        "spark.jars": ",".join(str(jar) for jar in connector_jars()),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": f"{directory}/scratch",
        "spark.driver.extraJavaOptions": java_options(directory),
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    calls: list[int] = []

    def write(rows: DataFrame, sequence: int) -> None:
        calls.append(sequence)
        rows.write.mode("overwrite").parquet(f"{directory}/output/sequence={sequence}")

    def source(starting_offsets: str) -> DataFrame:
        return (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", job.get("kafka.bootstrap.servers"))
            .option("subscribe", topic)
            .option("startingOffsets", starting_offsets)
            .load()
        )

    fetched, woken = threading.Event(), threading.Event()

    def stop(phase: Phase, subject: str) -> None:
        if phase is Phase.ACKNOWLEDGED:
            if rows == "before":
                fetched.wait()
            os.kill(os.getpid(), signal.SIGSTOP)
            woken.set()

    def local_rows(*arguments: Any) -> DataFrame | None:
        if rows == "after":
            woken.wait()
        found = fetch(*arguments)
        fetched.set()
        return found

    fetch, driver.local_rows = driver.local_rows, local_rows

    add_observer(stop)
    query = StatefulQuery(job).input(source).key_by("key").process(large, OUTPUT).output(write)
    running = query.trigger(availableNow=True).option("checkpointLocation", f"file://{directory}/zombie").start()
    error = None
    try:
        running.awaitTermination()
    except StatemgrError as failure:
        error = type(failure).__name__
    spark.stop()
    print(json.dumps({"calls": calls, "error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
