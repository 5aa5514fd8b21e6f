"""Drivers and workers need bounded memory for a batch of millions of rows, most of which have the same key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.jobs import SEGMENTS
from tests.servers import KafkaServer
from tests.spark.cluster import Cluster
from tests.spark.conftest import make_pipeline

ROWS = 5_000_000
#: Characters in each row: hexadecimal digits of a hash, which compress to half.
PAYLOAD = 128
#: The limit for a Python process. The rows of the hot key alone take 600 MB.
LIMIT = 450 * 1024 * 1024


@pytest.mark.heavy
def test_five_million_rows_of_which_one_key_has_nearly_all(
    spark: SparkSession, kafka: KafkaServer, tmp_path: Path
) -> None:
    """Memory stays bounded when 90 % of the rows go to one task, all become output, and the JVM heaps are small."""
    files, notes = tmp_path / "input", tmp_path / "notes"
    notes.mkdir()
    rows = spark.range(0, ROWS, 1, 8).selectExpr(
        "if(id % 10 = 0, concat('key-', id % 1000), 'hot') as key", "repeat(sha2(string(id), 256), 2) as payload"
    )
    rows.write.parquet(str(files))
    job = make_pipeline(None, kafka, tmp_path, tasks=4, kind=SEGMENTS, backup=["blob-store"])
    heap = {"spark.driver.memory": "512m", "spark.executor.memory": "512m"}
    cluster = Cluster(tmp_path / "cluster", "local-cluster[2,1,512]", heap)
    try:
        cluster.run(
            job,
            ["tests.spark.faults:Measured", str(notes)],
            files=files.as_uri(),
            schema="key string, payload string",
            output="tests.spark.faults:Summing",
            output_arguments=[str(notes)],
            output_schema="key string, payload string",
        )
    finally:
        cluster.close()

    hot = ROWS - ROWS // 10
    state = job.state("blob-store", "spark-hash(string)")
    assert state.pop("hot") == hot
    assert state == {f"key-{number}": ROWS // 1000 for number in range(0, 1000, 10)}
    delivered = json.loads((notes / "output-1").read_text())
    assert delivered[:3] == [ROWS, hot, ROWS * PAYLOAD]
    assert max(int(note.read_text()) for note in notes.glob("rows-*")) >= hot
    workers = [int(note.read_text()) for note in notes.glob("peak-*")]
    peaks = {"driver": delivered[3], "workers": max(workers)}
    print(f"peak memory in MiB: { {name: peak >> 20 for name, peak in peaks.items()} }")
    assert all(peak < LIMIT for peak in peaks.values()), peaks
