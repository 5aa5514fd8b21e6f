"""A Spark Connect client and its server, for ``test_connect``: ``connect_job.py config.json``.

It prints one JSON object: the rows that it read from the job's state, the values that it looked up, and the error of a
stateful query.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from spark_integration import StatefulQuery, StateTable, register
from statemgr import JobConfig
from statemgr.errors import InvalidError
from tests.spark.conftest import OUTPUT, count


def main(path: str) -> None:
    """Read state, look up values, and start a stateful query that is refused."""
    config = JobConfig.from_mapping(json.loads(Path(path).read_text()))
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    register(spark)
    state = spark.read.format("statemgr.state").options(config=Path(path).read_text(), store="rates").load()
    table = StateTable(config, "rates")

    def enrich(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.append_column("rate", table.lookup(batch.column("currency")))

    orders = spark.createDataFrame([("EUR",), ("GBP",)], "currency string")
    looked_up = orders.mapInArrow(enrich, "currency string, rate bigint")
    query = StatefulQuery(config).key_by("value").process(count, OUTPUT).output(lambda rows, sequence: None)
    try:
        query.input(spark.readStream.format("rate").load()).option("checkpointLocation", "file:///nowhere").start()
        refused = ""
    except InvalidError as error:
        refused = str(error)
    found = {
        "state": sorted([row.key, row.value] for row in state.collect()),
        "looked_up": sorted([row.currency, row.rate] for row in looked_up.collect()),
        "refused": refused,
    }
    print(json.dumps(found), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
