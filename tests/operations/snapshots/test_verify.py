"""`statemgr snapshots verify` finds every kind of damage to a needed blob, on a directory and on S3."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.health import verify_blobs
from statemgr.reader import JobReader
from statemgr.wiring import open_services
from tests.blob_ages import time_passes
from tests.commits import TASK, commit, referenced
from tests.jobs import SEGMENTS, SNAPSHOTS, job_mapping
from tests.servers import KafkaServer

Run = Callable[..., Result]


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.long)])
def job(request: pytest.FixtureRequest, kafka: KafkaServer, tmp_path: Path) -> JobConfig:
    """Create a job with two checkpoints, which need one snapshot and a segment, with parts of 64 KiB."""
    s3 = request.getfixturevalue("s3") if request.param == "s3" else None
    more = {"blob.store.s3.path.style": True} if s3 else {}
    mapping = job_mapping(kafka, tmp_path, s3=s3, backup=("blob-store",), kind=SEGMENTS, blob__store__part__size=65536)
    config = JobConfig.from_mapping(mapping | more)
    commit(config, {b"a": random.Random(1).randbytes(300_000)}, 1)
    commit(config, {b"b": random.Random(2).randbytes(50_000)}, 2)
    return config


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `statemgr snapshots verify` for a job."""

    def run_(config: JobConfig, *arguments: str) -> Result:
        path = tmp_path / "job.toml"
        path.write_text("\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in config.to_mapping().items()))
        return CliRunner().invoke(cli, ["snapshots", "verify", "--config", str(path), *arguments])

    return run_


def replaced(
    config: JobConfig, blob_id: str, change: Callable[[bytes], bytes | None], ttl_days: int | None = None
) -> None:
    """Put other bytes under the name of a blob, or delete the blob."""
    services = open_services(config)
    try:
        store = services.blobs()
        with store.get(blob_id) as reader:
            size = store.stat(blob_id).size
            buffer, read = memoryview(bytearray(size)), 0
            while read < size:
                read += reader.readinto(buffer[read:])
        store.delete(blob_id)
        changed = change(bytes(buffer))
        if changed is not None:
            store.put(blob_id, changed, ttl_days=ttl_days)
    finally:
        services.close()


def part(config: JobConfig) -> str:
    """Return a blob that holds bytes of a table."""
    return max(referenced(config), key=lambda blob_id: blob_id.endswith(".1"))


def flipped(data: bytes) -> bytes:
    """Flip one bit in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def test_a_whole_state_is_whole(job: JobConfig, run: Run) -> None:
    """The command counts all blobs and reads all bytes. A sample is smaller, and a wrong share is refused."""
    looked = json.loads(run(job, "--json").stdout)
    assert looked["blobs"] == len(referenced(job))
    assert (looked["tasks"], looked["checkpoints"], looked["read"]) == (1, 2, 0)
    read = json.loads(run(job, "--read-data", "--json").stdout)
    assert read["read_size"] == read["size"] == looked["size"] > 300_000
    sample = json.loads(run(job, "--read-data", "--sample", "20%", "--json").stdout)
    assert 0 < sample["read"] < read["read"]
    for output in (looked, read, sample):
        assert output["damaged"] == output["expiring"] == []
    shown = run(job)
    assert shown.exit_code == 0
    assert "all blobs are there" in shown.stderr
    assert run(job, "--read-data", "--sample", "0%").exit_code == 2
    assert run(job, "--sample", "5%").exit_code == 2


@pytest.mark.parametrize("damage", ["lost", "shorter", "flipped"])
def test_a_damaged_part_is_named(job: JobConfig, run: Run, damage: str) -> None:
    """FAULTS 13: the exit status is 4, and the output names the blob. Only a read of the data finds a flipped bit."""
    blob_id = part(job)
    change = {"lost": lambda data: None, "shorter": lambda data: data[:-1], "flipped": flipped}[damage]
    replaced(job, blob_id, change)
    looked = run(job, "--json")
    assert looked.exit_code == (0 if damage == "flipped" else 4)
    read = run(job, "--read-data", "--json")
    assert read.exit_code == 4
    [finding] = json.loads(read.stdout)["damaged"]
    assert (finding["blob_id"], finding["task"], finding["store"]) == (blob_id, TASK, "totals")
    assert blob_id in run(job, "--read-data").stdout


def test_a_task_without_a_checkpoint_is_not_whole(job: JobConfig, run: Run) -> None:
    """A mistyped task would have no blobs to check."""
    missing = run(job, "--task", "Partition 9")
    assert missing.exit_code == 4
    assert "the topic has no checkpoint of the task" in missing.stderr


def test_a_lost_index_is_named_once(job: JobConfig, run: Run) -> None:
    """Both checkpoints that need it are named with it. The command still checks the other blobs."""
    [index] = {blob_id for blob_id in referenced(job) if blob_id.endswith("/index")}
    replaced(job, index, lambda data: None)
    result = run(job, "--json")
    assert result.exit_code == 4
    found = json.loads(result.stdout)
    [finding] = found["damaged"]
    assert finding["blob_id"] == index
    with JobReader(job) as reader:
        [record] = reader.retaining()
    assert [finding["checkpoint_id"], *finding["others"]] == [str(one.checkpoint_id) for one in record.checkpoints]
    assert found["blobs"] > 0


def test_a_ttl_counts_once_the_commit_must_be_over(job: JobConfig, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS 11: the clean-up of a fresh commit may still be running, so a TTL counts only later."""
    blob_id = part(job)
    replaced(job, blob_id, lambda data: data, ttl_days=30)
    assert run(job).exit_code == 0
    time_passes(monkeypatch)
    result = run(job, "--json")
    assert result.exit_code == 1
    assert [finding["blob_id"] for finding in json.loads(result.stdout)["expiring"]] == [blob_id]
    assert "still has a TTL" in run(job).stdout


def test_what_a_commit_evicts_meanwhile_is_no_damage(
    kafka: KafkaServer, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit deletes the blobs of the oldest checkpoint after they were listed. The command reports no damage."""
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, backup=("blob-store",), kind=SNAPSHOTS, task__checkpoint__retained=1)
    )
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        task.store("totals").put(b"a", random.Random(1).randbytes(100_000))
        task.commit({"orders-0": 1})
        original = verify_blobs._look

        def commit_first(*arguments: object) -> None:
            task.store("totals").put(b"a", random.Random(2).randbytes(100_000))
            task.commit({"orders-0": 2})
            original(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(verify_blobs, "_look", commit_first)
        result = run(config, "--read-data", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["damaged"] == []
