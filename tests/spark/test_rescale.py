"""A Spark job that gets more tasks, then fewer, continues with every key in its task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from confluent_kafka import Producer

from spark_integration import StateContext
from statemgr import JobConfig, Store
from statemgr.cli.main import cli
from tests.cli.test_running_job import write_toml
from tests.spark.conftest import OUTPUT, Pipeline

MakePipeline = Callable[..., Pipeline]


def add_up(
    batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
) -> Iterator[pa.RecordBatch]:
    """Count rows per key in a store that only has the keys of the input."""
    counts = Counter(key for batch in batches for key in batch.column("key").to_pylist())
    totals = stores["totals"]
    for key, change in counts.items():
        totals.put(key, b"%d" % (int(totals.get(key) or b"0") + change))
    names = [key.decode() for key in counts]
    yield pa.RecordBatch.from_pydict({"key": names, "count": list(counts.values()), "attempt": [""] * len(names)})


def produce(job: Pipeline, rows: int) -> None:
    """Write rows with keys to the topic."""
    producer = Producer({"bootstrap.servers": job.kafka.bootstrap_servers})
    for i in range(rows):
        key = f"key-{i % 97}"
        job.produced[key] = job.produced.get(key, 0) + 1
        producer.produce(job.topic, key=key, value=str(i))
    assert producer.flush(30) == 0


@pytest.mark.long
def test_a_spark_job_gets_more_tasks_and_fewer(
    pipeline: MakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Spark's hash, 2 → 5 → 3 tasks and the same checkpoint location, no row is lost or counted twice."""
    monkeypatch.chdir(tmp_path)
    job = pipeline(tasks=2, partitions=3)
    for tasks in (5, 3, None):
        produce(job, 300)
        job.run(job.query().process(add_up, OUTPUT))
        for factory in job.config.stores["totals"].backup_factories:
            assert job.state(factory, "spark-hash(binary)") == job.produced
        assert job.outputs.counts() == job.produced
        if tasks is None:
            return
        write_toml(job.config, tmp_path / "job.toml")
        done = CliRunner().invoke(cli, ["rescale", "--tasks", str(tasks), "--write"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        job.config = JobConfig.from_file(tmp_path / "job.toml")
        assert job.config.tasks == tasks
        assert job.state("blob-store", "spark-hash(binary)") == job.produced
