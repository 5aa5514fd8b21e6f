"""Sent to a cluster with ``spark-submit``: the same rows through a processor and through a function, to their end."""

from __future__ import annotations

import json
import sys

from pyspark.sql import DataFrame, SparkSession
from shipped import OUTPUT, Totals, add_up

from spark_integration import StatefulQuery, stateful
from statemgr import JobConfig

if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    spark = SparkSession.builder.getOrCreate()

    def rows(starting_offsets: str) -> DataFrame:
        """The input is files, so that no connector is needed."""
        return spark.readStream.schema("customer string, amount bigint").json(order["input"])

    def config(kind: str) -> JobConfig:
        """One job for each query."""
        return JobConfig.from_mapping(order["config"] | {"job.name": f"{order['config']['job.name']}-{kind}"})

    def place(kind: str, what: str) -> str:
        """A directory of a query."""
        return f"{order['output']}/{kind}/{what}"

    applied = stateful(rows, "customer", config=config("processor")).transformWithState(
        Totals(), OUTPUT, "Update", "None"
    )
    function = StatefulQuery(config("function")).input(rows).key_by("customer").process(add_up, OUTPUT)
    for kind, writer in (("processor", applied.writeStream), ("function", function.writeStream)):
        query = (
            writer.format("json")
            .option("checkpointLocation", place(kind, "location"))
            .trigger(availableNow=True)
            .start(place(kind, "rows"))
        )
        query.awaitTermination()
    spark.stop()
