"""The Delta Lake sink of docs/spark.md, with drivers killed around the publish and the output."""

from __future__ import annotations

from pathlib import Path

import pytest

from statemgr.phases import Phase
from statemgr_tools.dev import connector_jars, jars
from tests.docs.blocks import blocks
from tests.jobs import SEGMENTS
from tests.servers import KafkaServer
from tests.spark.cluster import Cluster, order_for
from tests.spark.conftest import make_pipeline

#: The newest artifact in Maven Central for PySpark 4.2.
DELTA = jars.Artifact("io.delta", "delta-spark_4.2_2.13", "4.4.0")


@pytest.mark.long
@pytest.mark.timeout(900)  # the first run fetches the library
def test_a_delta_table_has_each_sequence_once(kafka: KafkaServer, tmp_path: Path) -> None:
    """The table has each sequence once after kills between publish and output, inside the output, and after it."""
    # Spark itself brings the other jars
    delta = [
        jar
        for jar in jars._jars(DELTA, transitive=True, cache=None)
        if jar.name.startswith(("delta-", "unitycatalog-"))
    ]
    files = [*connector_jars(), *delta]
    settings = {
        "spark.jars": ",".join(map(str, files)),
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }
    (program,) = blocks("docs/spark.md", "### Delta Lake")
    job = make_pipeline(None, kafka, tmp_path, tasks=2, kind=SEGMENTS)
    table = str(tmp_path / "delta")
    deaths = [Phase.OUTPUT, "inside", "after", None]
    for number, death in enumerate(deaths):
        job.produce(40)
        phase = {"kill": death} if isinstance(death, Phase) else {}
        of_sink = [death] if death in ("inside", "after") else []
        order = order_for(
            job,
            ["tests.spark.conftest:count"],
            per_batch=20,
            output="tests.spark.faults:DeltaTable",
            output_arguments=[program, table, *of_sink],
            **phase,
        )
        cluster = Cluster(tmp_path / f"driver-{number}", "local[2,2]", settings)
        try:
            if death:
                cluster.ask_to_die(order)
                continue
            answer = cluster.ask(order)
            assert "error" not in answer, answer
            found = cluster.ask({"kind": "read", "sql": f"select key, sum(count) from delta.`{table}` group by key"})
        finally:
            cluster.close()

    assert dict(found["rows"]) == job.produced == job.state("blob-store")
