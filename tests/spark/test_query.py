"""A stateful query from start to end: state, output, restores, lost locations and idle input."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from statemgr.errors import BatchMismatch
from tests.jobs import ALL, DUAL, SEGMENTS, SNAPSHOTS
from tests.spark.conftest import Pipeline

MakePipeline = Callable[..., Pipeline]


@pytest.mark.parametrize("kind", [pytest.param(SNAPSHOTS, marks=pytest.mark.long), SEGMENTS])
def test_state_and_output_hold_every_row_once(pipeline: MakePipeline, kind: str) -> None:
    """After several batches, which include rows without a key, every backend and the output equal the input.

    A start without new rows runs no batch and gives no output.
    """
    job = pipeline(backup=DUAL, kind=kind)
    job.produce(1000)

    running = job.run(job.query(per_batch=300))

    assert [report.sequence for report in running.recentBatches] == [1, 2, 3, 4]
    for factory in DUAL:
        assert job.state(factory) == job.produced
    assert job.outputs.counts() == job.produced
    assert [sequence for sequence, _ in job.outputs.calls] == [1, 2, 3, 4]

    assert job.run().recentBatches == ()
    assert len(job.outputs.calls) == 4


@pytest.mark.parametrize(
    ("factory", "kind"), [pytest.param(*of, marks=pytest.mark.long if of == ALL[1] else ()) for of in ALL]
)
def test_a_new_machine_restores_from_the_configured_backend(pipeline: MakePipeline, factory: str, kind: str) -> None:
    """After the loss of the local state, the next batch restores from the configured backend and reports it."""
    job = pipeline(backup=[factory], kind=kind)
    job.produce(100)
    job.run(job.query(per_batch=40))
    job.produce(100)

    running = job.run(job.query(config=job.elsewhere(factory)))

    restored = {(store.task, store.factory) for store in running.recentBatches[0].restored}
    assert restored == {(f"Partition {i}", factory) for i in range(3)}
    assert job.state(factory) == job.produced
    assert job.outputs.counts() == job.produced


def test_a_lost_checkpoint_location_loses_nothing(pipeline: MakePipeline) -> None:
    """A new location starts at the published offsets. Sequence numbers continue, although Spark's batch IDs restart."""
    job = pipeline()
    # Spark resolves and reads a plain path, which may be on any file system.
    query = job.query().option("checkpointLocation", str(job.location))
    job.produce(100)
    job.run(query)
    shutil.rmtree(job.location)
    job.produce(100)

    running = job.run(query)

    assert [(r.batch_id, r.sequence) for r in running.recentBatches] == [(0, 2)]
    assert job.state("blob-store") == job.produced
    assert job.outputs.counts() == job.produced


@pytest.mark.parametrize("form", [pytest.param("file://{}", marks=pytest.mark.long), "{}"])
def test_directories_with_a_space(pipeline: MakePipeline, form: str) -> None:
    """Location, state and blobs in a path with a space: Spark and statemgr use the same directories."""
    job = pipeline(tasks=2)
    job.directory = job.directory / "my data"
    job.directory.mkdir()
    changes = {"state.dir": str(job.directory / "state"), "blob.store.uri": (job.directory / "blobs").as_uri()}
    job.config = type(job.config).from_mapping({**job.config.to_mapping(), **changes})
    query = job.query(config=job.config).option("checkpointLocation", form.format(job.location))
    for _ in range(2):
        job.produce(50)
        job.run(query)

    assert (job.location / "commits" / "1").is_file()
    assert job.state("blob-store") == job.outputs.counts() == job.produced


def test_a_plain_dataframe_at_a_new_location_is_refused(pipeline: MakePipeline) -> None:
    """A plain DataFrame continues at its own location. At a new one it is rejected, with the callable form as hint."""
    job = pipeline()
    job.produce(50)
    plain = job.query().input(job.rows("earliest"))
    job.run(plain)
    job.produce(50)
    job.run(plain)
    assert job.state("blob-store") == job.produced

    with pytest.raises(BatchMismatch, match="lambda starting_offsets"):
        plain.option("checkpointLocation", (job.directory / "other").as_uri()).start()


def test_a_batch_without_rows_is_a_batch_of_every_task(pipeline: MakePipeline) -> None:
    """A filter that drops all rows still moves the offsets: every task commits, with and without adaptive plans."""
    job = pipeline(tasks=4)
    job.produce(60)
    for adaptive in ("true", "false"):
        job.spark.conf.set("spark.sql.adaptive.enabled", adaptive)
        job.run(job.query(per_batch=30).input(lambda offsets: job.rows(offsets).where("offset < 0")))
        job.produce(30)
    job.spark.conf.unset("spark.sql.adaptive.enabled")

    contents = job.contents()
    assert sorted(contents) == [f"Partition {i}" for i in range(4)]
    assert all(set(content) == {b"!attempt"} for content in contents.values())
    assert [rows for _, rows in job.outputs.calls] == [[], []]


def test_secrets_show_in_no_setting_plan_or_progress(pipeline: MakePipeline, s3: object) -> None:
    """The workers get S3 keys that are in files. The keys appear in no setting of Spark, plan, progress or repr."""
    from tests.servers import S3Server

    assert isinstance(s3, S3Server)
    job = pipeline(s3=s3)
    files = {}
    for name, secret in (("access", s3.access_key), ("secret", s3.secret_key)):
        file = job.directory / name
        file.write_text(secret)
        files[f"blob.store.s3.{name}.key"] = f"${{file:{file}}}"
    job.config = type(job.config).from_mapping({**job.config.to_mapping(), **files})
    job.produce(50)
    plans: list[str] = []

    def write(rows: object, sequence: int) -> None:
        plans.append(rows._jdf.queryExecution().toString())  # type: ignore[attr-defined]
        job.outputs.write(rows, sequence)  # type: ignore[arg-type]

    running = job.run(job.query().output(write))

    assert job.state("blob-store") == job.produced
    settings = dict(job.spark.sparkContext.getConf().getAll()) | job.spark.conf.getAll
    seen = [*settings.values(), *plans, str(running.lastProgress), repr(job.query()), str(job.config.to_mapping())]
    assert not [text for text in seen if s3.secret_key in text or s3.access_key in text]
