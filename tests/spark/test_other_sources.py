"""Inputs other than Kafka are exact as long as the checkpoint location exists, and are rejected without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pyspark.sql import DataFrame

from spark_integration import StatefulQuery
from statemgr.errors import BatchMismatch
from statemgr.phases import Phase, observed
from tests.commits import current
from tests.jobs import DUAL
from tests.spark.conftest import Pipeline

MakePipeline = Callable[..., Pipeline]


class Files:
    """A directory of JSON files as the input of a job."""

    def __init__(self, job: Pipeline, directory: Path, with_kafka: bool = False) -> None:
        self.job, self.directory, self.with_kafka = job, directory, with_kafka
        directory.mkdir()

    def add(self, keys: Sequence[str]) -> None:
        """Add another file."""
        number = len(list(self.directory.iterdir()))
        (self.directory / f"{number}.json").write_text("\n".join(json.dumps({"key": key}) for key in keys))
        for key in keys:
            self.job.produced[key] = self.job.produced.get(key, 0) + 1

    def query(self) -> StatefulQuery:
        """Return a query that counts rows per key. ``with_kafka`` adds the rows of the job's topic."""

        def rows(offsets: str) -> DataFrame:
            spark = self.job.spark
            assert spark is not None
            files = spark.readStream.schema("key string").option("maxFilesPerTrigger", 1).json(str(self.directory))
            found = files.selectExpr("cast(key as binary) as key")
            return found.union(self.job.rows(offsets).select("key")) if self.with_kafka else found

        return self.job.query().input(rows)


@pytest.mark.long
@pytest.mark.parametrize("with_kafka", [False, True])
def test_files_are_counted_once(pipeline: MakePipeline, tmp_path: Path, *, with_kafka: bool) -> None:
    """Files count once after failures before and after the publish. A lost or older location is an error."""
    job = pipeline(tasks=2, backup=DUAL)
    files = Files(job, tmp_path / "in put", with_kafka)
    files.add(["a", "b", "a"])
    files.add(["c"])
    job.run(files.query())
    shutil.copytree(job.location, tmp_path / "older")
    for phase in (Phase.COMMIT_TRANSACTION, Phase.OUTPUT):
        files.add(["a", "d"])
        if with_kafka:
            job.produce(20)

        def fail(at: Phase, subject: str, phase: Phase = phase) -> None:
            if at is phase:
                raise OSError("killed")

        with observed(fail), pytest.raises(Exception, match="killed"):
            job.run(files.query())
    files.add(["e"])
    job.run(files.query())
    record = current(job.config)
    assert record is not None
    assert record.current.batch is not None
    assert record.current.batch.has_other_sources, "so a rollback refuses"
    for factory in DUAL:
        assert job.state(factory) == job.produced
    assert job.outputs.counts() == job.produced

    files.add(["f"])
    newest = tmp_path / "newest"
    shutil.move(job.location, newest)
    with pytest.raises(BatchMismatch, match="only that one can position source"):
        job.run(files.query())
    shutil.rmtree(job.location, ignore_errors=True)
    shutil.copytree(tmp_path / "older", job.location)
    with pytest.raises(BatchMismatch):
        job.run(files.query())
    shutil.rmtree(job.location)
    shutil.move(newest, job.location)
    job.run(files.query())
    assert job.state(DUAL[0]) == job.outputs.counts() == job.produced
