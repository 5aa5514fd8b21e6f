"""A query continues after ``statemgr checkpoints rollback``."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from statemgr.cli.main import cli
from statemgr.errors import BatchMismatch
from statemgr.reader import JobReader
from tests.cli.test_running_job import write_toml
from tests.jobs import DUAL, SEGMENTS
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
