"""Output comes from the attempts whose state was published, whatever Spark loses, recomputes or runs twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame

from spark_integration import StateContext, outbox, produced
from statemgr import StateManager, Store
from statemgr.errors import PermissionNeeded, UnavailableError
from statemgr.phases import Phase, add_observer, remove_observer
from tests.spark.conftest import OUTPUT, PARTITIONER, Pipeline, count

MakePipeline = Callable[..., Pipeline]


def accepted(job: Pipeline) -> set[str]:
    """Return the attempts of the published state, which the state itself records."""
    return {content[b"!attempt"].decode() for content in job.contents().values()}


@pytest.mark.long
@pytest.mark.parametrize("fetched_by", ["driver", "executors"])
def test_a_dropped_cached_block_does_not_change_the_output(
    pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, fetched_by: str
) -> None:
    """Rows name their attempt. They would differ if Spark computed them again, but the outbox returns the same rows."""
    if fetched_by == "executors":
        monkeypatch.setattr(outbox, "DRIVER_BYTES", 0)
    job = pipeline()
    job.produce(60)
    seen: list[list[tuple[object, ...]]] = []

    def write(rows: DataFrame, sequence: int) -> None:
        rows.persist()
        seen.append(sorted(tuple(row) for row in rows.collect()))
        context = rows.sparkSession.sparkContext
        cached = list(context._jsc.getPersistentRDDs().keySet())
        blocks = context._jvm.org.apache.spark.SparkEnv.get().blockManager()
        assert sum(blocks.removeRdd(rdd) for rdd in cached), "nothing was cached"
        seen.append(sorted(tuple(row) for row in rows.collect()))
        rows.unpersist()
        job.outputs.write(rows, sequence)

    job.run(job.query().output(write))

    assert seen[0] == seen[1] == job.outputs.calls[0][1]
    assert {row[2] for row in job.outputs.calls[0][1]} <= accepted(job)


class DieOnceAfterPreparing:
    """A process function whose first attempt at task 0 dies after it has prepared its commit and written all blobs."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Count, and make the first attempt die."""

        def die(phase: Phase, subject: str) -> None:
            if phase is Phase.PREPARED and context.task == "Partition 0":
                remove_observer(die)
                if not self.flag.exists():
                    self.flag.write_text(context.attempt)
                    raise RuntimeError("the executor is lost")

        add_observer(die)
        yield from count(batches, stores, context)


def test_of_two_attempts_only_the_accepted_one_is_in_state_and_output(pipeline: MakePipeline, tmp_path: Path) -> None:
    """When Spark runs a task twice and takes the second attempt, only that one's rows and state are published."""
    job = pipeline()
    job.produce(60)
    flag = tmp_path / "first-attempt"

    job.run(job.query().process(DieOnceAfterPreparing(flag), OUTPUT))

    first = flag.read_text()
    assert first not in accepted(job)
    rows = job.outputs.calls[0][1]
    assert {row[2] for row in rows} == accepted(job)
    assert job.outputs.counts() == job.produced == job.state("kafka-changelog")


class CountCalls:
    """A process function that leaves a file for every call."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Count rows, and record the call."""
        (self.directory / f"{context.sequence}-{context.task}-{context.attempt}").touch()
        yield from count(batches, stores, context)


def test_a_batch_replayed_after_its_publish_gives_the_same_rows_again(pipeline: MakePipeline, tmp_path: Path) -> None:
    """If the output fails after the publish, a restart delivers the same rows and sequence without rerunning tasks."""
    job = pipeline()
    job.produce(60)
    calls = tmp_path / "calls"
    calls.mkdir()
    query = job.query().process(CountCalls(calls), OUTPUT)
    given: list[tuple[int, list[tuple[object, ...]]]] = []

    def fail(rows: DataFrame, sequence: int) -> None:
        given.append((sequence, sorted(tuple(row) for row in rows.collect())))
        raise ValueError("the sink is down")

    with pytest.raises(Exception, match="the sink is down"):
        job.run(query.output(fail))
    before = os.listdir(calls)
    running = job.run(query)

    assert [report.replayed for report in running.recentBatches] == [True]
    assert job.outputs.calls == given
    assert os.listdir(calls) == before
    assert job.state("blob-store") == job.outputs.counts() == job.produced


@pytest.mark.long
def test_output_cut_off_before_the_location_was_lost_is_given_at_the_next_start(pipeline: MakePipeline) -> None:
    """After a failed output and the loss of the location, Spark cannot replay, so the start delivers the output."""
    job = pipeline()
    job.produce(60)

    def fail(rows: DataFrame, sequence: int) -> None:
        raise ValueError("the sink is down")

    with pytest.raises(Exception, match="the sink is down"):
        job.run(job.query().output(fail))
    job.run(job.query().option("checkpointLocation", (job.directory / "new").as_uri()))

    assert job.outputs.counts() == job.produced == job.state("blob-store")


def large(
    batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
) -> Iterator[pa.RecordBatch]:
    """Count, and yield more rows than fit into a checkpoint."""
    yield from count(batches, stores, context)
    noise = [os.urandom(500).hex() for _ in range(100)]
    yield pa.RecordBatch.from_pydict({"key": noise, "count": [0] * 100, "attempt": [""] * 100})


class InParts:
    """A process function whose output is stored in small parts."""

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of :func:`large` while this worker has smaller limits."""
        limits = {"PART_BYTES": 17_000, "_SLICE_BYTES": 10_000}
        before = {name: getattr(produced, name) for name in limits}
        vars(produced).update(limits)
        try:
            yield from large(batches, stores, context)
        finally:
            vars(produced).update(before)


@pytest.mark.parametrize("fetched_by", ["driver", pytest.param("executors", marks=pytest.mark.long)])
def test_output_that_is_too_large_for_one_blob(
    pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, fetched_by: str
) -> None:
    """Output that is too large for one blob is split into several, and all of it is delivered."""
    if fetched_by == "executors":
        monkeypatch.setattr(outbox, "DRIVER_BYTES", 0)
    job = pipeline(tasks=2, backup=["blob-store"])
    job.produce(20)

    job.run(job.query().process(InParts(), OUTPUT))

    with StateManager(job.config, PARTITIONER) as manager:
        stored = [c.attachments for c in manager.acquire().checkpoints.values() if c is not None]
    assert min(map(len, stored)) > 1
    assert len({part.blob.blob_id for parts in stored for part in parts if part.blob}) >= 4
    keys = [row[0] for row in job.outputs.calls[0][1]]
    noise = [key for key in keys if len(key) == 1000]
    assert len(noise) == len(set(noise)) == 200
    assert {key: n for key, n in job.outputs.counts().items() if n} == job.produced


def test_output_that_is_gone_at_the_next_start(pipeline: MakePipeline) -> None:
    """If the output was cut off and the stored rows are lost, a start needs a permission, wherever its location is."""
    job = pipeline(tasks=2)
    job.produce(20)

    def fail(rows: DataFrame, sequence: int) -> None:
        raise ValueError("the sink is down")

    with pytest.raises(Exception, match="the sink is down"):
        job.run(job.query().process(large, OUTPUT).output(fail))
    stored = [path for path in (job.directory / "blobs").rglob("*") if path.is_file() and "_commit" in path.parts]
    assert stored
    for path in stored:
        path.unlink()

    with pytest.raises(PermissionNeeded, match="output rows of sequence 1 are lost"):
        job.query().option("checkpointLocation", (job.directory / "new").as_uri()).start()
    job.produce(20)
    with pytest.raises(PermissionNeeded, match="allow_skipped_output"):
        job.run()
    job.run(allow_skipped_output=True)
    assert [sequence for sequence, _ in job.outputs.calls] == [2]
    assert sum(job.outputs.counts().values()) == 20
    assert job.state("blob-store") == job.produced


class Unavailable:
    """A process function that raises a retryable error ``times`` times."""

    def __init__(self, directory: Path, times: int) -> None:
        self.directory, self.times = directory, times

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Count, unless the call raises the error."""
        if context.task == "Partition 1" and len(list(self.directory.iterdir())) < self.times:
            (self.directory / context.attempt).touch()
            raise UnavailableError("the blob store did not answer", hint="look at it", blob="a/b")
        yield from count(batches, stores, context)


@pytest.mark.long
def test_a_retryable_error_is_retried_by_spark_and_typed_when_it_stays(pipeline: MakePipeline, tmp_path: Path) -> None:
    """After one such error, the second attempt succeeds. If it persists, the query ends with it and its hint."""
    job = pipeline()
    job.produce(60)
    (tmp_path / "once").mkdir()
    job.run(job.query().process(Unavailable(tmp_path / "once", 1), OUTPUT))
    assert job.outputs.counts() == job.produced

    job.produce(10)
    (tmp_path / "always").mkdir()
    with pytest.raises(UnavailableError, match="did not answer") as caught:
        job.run(job.query().process(Unavailable(tmp_path / "always", 99), OUTPUT))
    assert caught.value.where["blob"] == "a/b"
    assert caught.value.hint == "look at it"
    assert len(list((tmp_path / "always").iterdir())) == 2
