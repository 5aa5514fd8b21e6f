"""A query on executors in their own processes, for ``test_soak``: ``soak_job.py '{…}'``.

The query counts rows per key and sends the changes to a topic in the publishing transaction. If a typed error ends it,
the last line of its output is the error's class.
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import DataFrame, SparkSession

from spark_integration import StatefulQuery
from statemgr import JobConfig
from statemgr.errors import StatemgrError
from statemgr_tools.dev import connector_jars
from tests.spark.conftest import OUTPUT, count

JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


def main(text: str) -> None:
    """Run to the end of the input, or until killed."""
    order = json.loads(text)
    job = JobConfig.from_mapping(order["config"])
    settings = {
        "spark.jars": ",".join(str(jar) for jar in connector_jars()),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": order["scratch"],
        "spark.driver.extraJavaOptions": JAVA,
        "spark.executor.extraJavaOptions": JAVA,
        "spark.sql.shuffle.partitions": "4",
        **order["settings"],
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
            .option("subscribe", order["topic"])
            .option("startingOffsets", starting_offsets)
            .option("maxOffsetsPerTrigger", order["per_batch"])
            .load()
        )

    changes = ("key", "cast(count as string) as value")
    query = StatefulQuery(job).input(rows).key_by("key").process(count, OUTPUT).then(lambda df: df.selectExpr(*changes))
    writer = query.writeStream.format("kafka").option("topic", order["output"]).trigger(**order["trigger"])
    try:
        writer.option("checkpointLocation", order["location"]).start().awaitTermination()
    except StatemgrError as error:
        print(type(error).__name__, flush=True)
        raise


if __name__ == "__main__":
    main(sys.argv[1])
