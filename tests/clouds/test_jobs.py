"""Jobs whose blobs are on Google Cloud Storage or Azure: kills, garbage collection, copies, a loop and a Spark job."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from statemgr import JobConfig
from statemgr.blobs.retrying import RetryingBlobStore
from statemgr.cli.main import cli
from statemgr.phases import Phase
from statemgr.wiring import open_services
from tests.blob_ages import names, time_passes
from tests.commits import TASK, commit, published, referenced, totals
from tests.core.crash.model import STORES, state
from tests.core.crash.test_kill import check_exact, mapping_of, occurrence_of, start
from tests.jobs import SEGMENTS, SNAPSHOTS, contents, elsewhere, job_mapping, with_changes
from tests.loop_members import Process, make_topic, produce
from tests.loop_members import published as published_offsets
from tests.servers import CloudServer, KafkaServer
from tests.spark.test_demo import write_table

pytestmark = [pytest.mark.integration, pytest.mark.heavy]
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command for a job."""
    monkeypatch.chdir(tmp_path)

    def write(config: JobConfig, path: Path) -> None:
        path.write_text("\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in config.to_mapping().items()))

    def run_(config: JobConfig, *arguments: str, new: JobConfig | None = None) -> Result:
        write(config, tmp_path / "job.toml")
        if new is not None:
            write(new, tmp_path / "new.toml")
        return CliRunner().invoke(cli, [*arguments], catch_exceptions=False)

    return run_


@pytest.mark.crash
@pytest.mark.parametrize(
    ("backends", "phase"),
    [
        ("blobs", Phase.UPLOAD),
        ("dual", Phase.SEND_CHECKPOINT),
        ("blobs", Phase.ACKNOWLEDGED),
        ("blobs", Phase.REMOVE_TTL),
        ("segments", Phase.PUT_SEGMENTS),
        ("segments", Phase.MATERIALIZED),
        ("segments", Phase.DELETE_BLOBS),
    ],
)
def test_killed_in_a_commit(
    kafka: KafkaServer, cloud: CloudServer, tmp_path: Path, backends: str, phase: Phase
) -> None:
    """FAULTS 1, 2, 3, 5: after a kill in the third commit, the state is that of the second or the third, and the job
    goes on."""
    mapping = mapping_of(kafka, tmp_path, backends, task__checkpoint__retained=1) | cloud.settings()
    most = 40 if backends == "segments" else 5
    assert start(mapping, most, phase, occurrence_of(phase, backends)).wait(90) == -signal.SIGKILL
    config = JobConfig.from_mapping(mapping)
    done = check_exact(config, tmp_path, 1, most - 1)
    assert start(mapping, done + 2).wait(90) == 0
    last = elsewhere(config, tmp_path / "end", "blob-store")
    assert contents(last) == ({store: state(store, done + 2) for store in STORES}, {"input-0": done + 2})


@pytest.mark.crash
@pytest.mark.parametrize(("backends", "phase"), [("blobs", Phase.FETCH), ("segments", Phase.APPLY_SEGMENTS)])
def test_killed_in_a_restore(
    kafka: KafkaServer, cloud: CloudServer, tmp_path: Path, backends: str, phase: Phase
) -> None:
    """FAULT 7: after a kill during a restore on another machine, the next restore there is complete."""
    mapping = mapping_of(kafka, tmp_path, backends) | cloud.settings()
    mapping["task.commit.snapshot.interval"] = ["100 commits"] if backends == "segments" else ["1 commit"]
    assert start(mapping, 2).wait(90) == 0
    moved = {**mapping, "state.dir": str(tmp_path / "moved")}
    assert start(moved, 3, phase).wait(90) == -signal.SIGKILL
    check_exact(JobConfig.from_mapping(moved), tmp_path, 2, 2)


def test_garbage_of_a_killed_commit_is_collected(
    kafka: KafkaServer, cloud: CloudServer, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blobs that a killed commit uploaded are deleted after the grace period, and no others."""
    mapping = job_mapping(kafka, tmp_path, backup=("blob-store",), stores=STORES) | cloud.settings()
    assert start(mapping, 3, Phase.BEGIN, 3).wait(90) == -signal.SIGKILL
    config = JobConfig.from_mapping(mapping)
    needed = referenced(config)
    orphans = names(config) - needed
    assert orphans
    time_passes(monkeypatch)
    done = run(config, "gc", "--json", "--write")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["deleted"]["blobs"] == len(orphans)
    assert names(config) == needed
    assert published(config, "blob-store")[TASK] == {store: state(store, 2) for store in STORES}


@pytest.mark.parametrize("kind", [SNAPSHOTS, SEGMENTS])
def test_the_server_copies_a_job(kafka: KafkaServer, cloud: CloudServer, tmp_path: Path, run: Run, kind: str) -> None:
    """`statemgr copy` moves no byte through this machine, and nothing of the copy expires."""
    mapping = job_mapping(kafka, tmp_path, backup=("blob-store",), kind=kind) | cloud.settings()
    source = JobConfig.from_mapping(mapping)
    data = {b"key-%04d" % number: bytes([number % 251]) * 200 for number in range(2000)}
    commit(source, data, 5)
    commit(source, {b"second": b"2", b"key-0001": None}, 6)
    changes = {"job__name": f"{source.job_name}-new", "state__dir": str(tmp_path / "new")}
    target = with_changes(source, **changes, blob__store__uri=cloud.settings()["blob.store.uri"])
    done = run(source, "copy", "--to", "new.toml", "--json", "--write", new=target)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["blobs"]
    assert (found["streamed"], found["inside"] > 0) == (0, True)
    expected = {k: v for k, v in data.items() if k != b"key-0001"} | {b"second": b"2"}
    assert totals(target, "blob-store") == {TASK: expected}
    services = open_services(target)
    blobs = services.blobs()
    assert isinstance(blobs, RetryingBlobStore)
    assert {blobs.stat(blob_id).expires_ms for blob_id in referenced(target)} == {None}
    services.close()


def test_a_loop_goes_on_elsewhere(kafka: KafkaServer, cloud: CloudServer, tmp_path: Path) -> None:
    """A consumer loop counts, is killed, and another one restores from blobs on another machine. Nothing is lost or
    doubled."""
    topic, group = kafka.fresh_name("input"), kafka.fresh_name("group")
    make_topic(kafka, topic, 2)
    mapping = job_mapping(kafka, tmp_path, backup=("blob-store",), tasks=2, kind=SEGMENTS) | cloud.settings()
    config = JobConfig.from_mapping({**mapping, "task.commit.ms": 200})
    produce(kafka, topic, 2, range(500))
    first = Process.start(config, group, topic, tmp_path / "first.log")
    first.wait_for(lambda _: sum(published_offsets(config).values()) == 500)
    first.kill()
    produce(kafka, topic, 2, range(500, 800))
    moved = with_changes(config, state__dir=str(tmp_path / "elsewhere"))
    second = Process.start(moved, group, topic, tmp_path / "second.log")
    second.wait_for(lambda _: sum(published_offsets(config).values()) == 800)
    assert second.terminate()[1] is None
    counted = {key: int(value) for rows in totals(config, "blob-store").values() for key, value in rows.items()}
    assert counted == {b"k%d" % key: 16 for key in range(50)}


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_spark_job_with_kills(
    kafka: KafkaServer, cloud: CloudServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's Spark job is killed, restores from blobs, and its totals are equal to a plain count."""
    monkeypatch.setenv("STATEMGR_TEST_KAFKA", kafka.bootstrap_servers)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["--blob", cloud.kind, "--input", write_table(tmp_path / "table.csv", 600), "--key", "name"]
    arguments += ["--sum", "amount", "--kills", 1, "--seed", 5, "--aim", "publish.acknowledged"]
    result = CliRunner().invoke(cli, ["demo", *map(str, arguments), "--directory", str(tmp_path / "work")])
    assert result.exit_code == 0, result.output
    assert "killed in publish.acknowledged" in result.output
    assert result.output.count("equal  ") >= 3
    assert "blob-store" in result.output
