"""A query continues after ``statemgr checkpoints rollback``, and after ``topics repair`` has left out checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame

from spark_integration import StateContext
from statemgr.cli.main import cli
from statemgr.errors import BatchMismatch
from statemgr.model import codecs
from statemgr.model.checkpoint import CheckpointKey
from statemgr.reader import JobReader
from statemgr.stores.store import Store
from tests.cli.test_running_job import write_toml
from tests.jobs import DUAL, SEGMENTS, with_changes
from tests.kafka_jobs import send
from tests.spark.conftest import Pipeline


@pytest.mark.long
def test_a_query_goes_on_from_the_micro_batch_that_it_went_back_to(pipeline: Callable[..., Pipeline]) -> None:
    """The old location is rejected. A new one repeats the target batch's output, then delivers the rows after it."""
    job = pipeline(backup=DUAL, kind=SEGMENTS, task__checkpoint__retained=5)
    for _ in range(3):
        job.produce(100)
        job.run()
    first = job.outputs.calls[0]
    with JobReader(job.config) as reader:
        target = next(c for c in reader.records()["Partition 0"].checkpoints if c.sequence == 1)
    write_toml(job.config, job.directory / "job.toml")
    command = ["checkpoints", "rollback", "--config", str(job.directory / "job.toml"), "--write", "--json"]
    done = CliRunner().invoke(cli, [*command, "--to", str(target.checkpoint_id)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["input_offsets"] == dict(target.input_offsets)
    job.produce(100)
    with pytest.raises(BatchMismatch):
        job.run()

    job.outputs.calls.clear()
    running = job.run(job.query(per_batch=150).option("checkpointLocation", (job.directory / "new").as_uri()))

    assert job.outputs.calls[0] == first, "the output of the micro-batch is delivered again, unchanged"
    assert sum(target.input_offsets.values()) == 100
    sequences = [report.sequence for report in running.recentBatches]
    assert len(sequences) > 1
    assert sequences == list(range(5, 5 + len(sequences))), "the rollback itself is the fourth publish"
    for factory in DUAL:
        assert job.state(factory) == job.produced
    assert job.outputs.counts() == job.produced


def sequence_of(
    batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
) -> Iterator[pa.RecordBatch]:
    """Yield one row from task 0 with the sequence number of the batch."""
    for _ in batches:
        pass
    if context.task == "Partition 0":
        yield pa.RecordBatch.from_pydict({"sequence": [context.sequence]})


@pytest.mark.long
def test_the_output_after_lost_checkpoints_has_new_numbers(pipeline: Callable[..., Pipeline]) -> None:
    """The micro-batch whose job record is lost is made again with more rows. A sink that ignores the number that it has
    would drop them. The function sees the number of its output."""
    job = pipeline(tasks=2, partitions=1, backup=["blob-store"])
    seen: dict[int, int] = {}

    def write(rows: DataFrame, sequence: int) -> None:
        ((seen[sequence],),) = rows.collect()

    for location in ("old", "old", "new"):
        if location == "new":
            lost = codecs.encode_key(CheckpointKey(job.config.job_name, job.config.job_id, 1, "", 2, 2))
            send(job.config, job.config.checkpoint_topic, [(lost, b"damaged")])
            new = f"{job.config.checkpoint_topic}-new"
            write_toml(job.config, file := job.directory / "job.toml")
            command = ["topics", "repair", "--write", "--allow-older-checkpoints", "--to", new, "--config"]
            done = CliRunner().invoke(cli, [*command, str(file)])
            assert done.exit_code == 0, done.output
            job.config = with_changes(job.config, task__checkpoint__topic=new)
        job.produce(20)
        query = job.query().process(sequence_of, "sequence bigint").output(write)
        job.run(query.option("checkpointLocation", (job.directory / location).as_uri()))
    assert list(seen) == list(seen.values())
    (after,) = set(seen) - {1, 2}
    assert after > 1_000_000_000_000
