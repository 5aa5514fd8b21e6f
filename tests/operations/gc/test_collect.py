"""Garbage collection of real jobs, on a directory and on S3, with the command line, also while a job runs."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from statemgr import JobConfig, StateManager
from statemgr.blobs.file import FileBlobStore
from statemgr.cli.main import cli
from statemgr.errors import RetryableError
from statemgr.ids import IdSource
from statemgr.phases import Phase, observed
from statemgr.reader import JobReader
from statemgr.wiring import open_services
from tests.blob_ages import names, time_passes
from tests.commits import TASK, blob_files, commit, published, referenced, totals, write
from tests.core.crash.model import STORES, state
from tests.jobs import SEGMENTS, SNAPSHOTS, job_mapping, with_changes
from tests.servers import KafkaServer, S3Server

ROOT = Path(__file__).resolve().parents[3]
DAY_MS = 24 * 3600 * 1000
Run = Callable[..., Result]
Mapping = Callable[..., dict[str, object]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `statemgr gc` for a job."""

    def run_(config: JobConfig, *arguments: str) -> Result:
        path = tmp_path / "job.toml"
        path.write_text("\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in config.to_mapping().items()))
        return CliRunner().invoke(cli, ["gc", "--config", str(path), *arguments], catch_exceptions=False)

    return run_


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.long)])
def mapping(request: pytest.FixtureRequest, kafka: KafkaServer, tmp_path: Path) -> Mapping:
    """A job's configuration on each kind of blob store."""
    s3 = request.getfixturevalue("s3") if request.param == "s3" else None
    more = {"blob.store.s3.path.style": True} if s3 else {}
    return lambda **changes: job_mapping(kafka, tmp_path, s3=s3, **changes) | more  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mapping", "kind"),
    [pytest.param("file", SNAPSHOTS, marks=pytest.mark.long), ("s3", SNAPSHOTS), ("file", SEGMENTS)],
    indirect=["mapping"],
)
def test_orphans_of_a_killed_commit_are_collected(
    mapping: Mapping, run: Run, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """C6, FAULTS 2, 3: blobs that a killed commit uploaded are deleted after the grace period, and not before."""
    job = mapping(backup=("blob-store",), kind=kind, stores=STORES)
    order = {"config": job, "commits": 3, "phase": Phase.BEGIN, "occurrence": 3}
    child = subprocess.Popen([sys.executable, "-m", "tests.core.crash.child", json.dumps(order)], cwd=ROOT)
    assert child.wait(60) == -signal.SIGKILL
    config = JobConfig.from_mapping(job)
    needed = referenced(config)
    orphans = names(config) - needed
    assert len(orphans) >= (len(STORES) if kind == SNAPSHOTS else 1)

    at_once = json.loads(run(config, "--json", "--write").stdout)
    assert (at_once["young"]["blobs"], at_once["orphans"]["blobs"]) == (len(orphans), 0)
    time_passes(monkeypatch)
    dry = run(config, "--json")
    assert dry.exit_code == 0
    assert json.loads(dry.stdout)["orphans"]["blobs"] == len(orphans)
    assert set(json.loads(dry.stdout)["orphan_examples"]) == set(sorted(orphans)[:20])
    assert names(config) == needed | orphans
    shown = run(config)
    assert "add --write" in shown.stderr
    assert "orphans" in shown.stdout

    done = run(config, "--json", "--write")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["deleted"]["blobs"] == len(orphans)
    assert names(config) == needed
    assert published(config, "blob-store")[TASK] == {store: state(store, 2) for store in STORES}


def test_blobs_of_a_removed_store_are_collected(mapping: Mapping, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A12, FAULT 31: once no checkpoint names the store, garbage collection deletes the blobs that its clean-up
    left."""
    config = JobConfig.from_mapping(mapping(backup=("blob-store",), stores=("old", "totals")))
    commit(config, {b"a": random.Random(1).randbytes(100_000)}, 1)
    left = with_changes(config, task__checkpoint__retained=1)
    alone = JobConfig.from_mapping({k: v for k, v in left.to_mapping().items() if not k.startswith("stores.old.")})
    with monkeypatch.context() as patch:
        # the store's owner dies before it has cleaned up
        patch.setattr("statemgr.flows.committing.clean_up.CleanUp._delete_evicted", lambda *_: None)
        commit(alone, {b"b": b"2"}, 2, allow_removed_stores=True)
    needed = referenced(alone)
    assert any("/old/" in name for name in names(alone) - needed)
    time_passes(monkeypatch)
    assert run(alone, "--write").exit_code == 0
    assert names(alone) == needed
    assert set(totals(alone, "blob-store")[TASK]) == {b"a", b"b"}


def test_what_stops_a_collection(mapping: Mapping, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS 13, 17, 38: if a blob is lost, the topic does not know the job, or the grace period is too short, nothing
    is deleted."""
    config = JobConfig.from_mapping(mapping(backup=("blob-store",)))
    commit(config, {b"a": random.Random(1).randbytes(100_000)}, 1)
    services = open_services(config)
    services.blobs().put(f"{config.job_name}/1/Partition_0/totals/killed/index", b"x", ttl_days=30)
    time_passes(monkeypatch)
    before = names(config)

    short = run(config, "--grace", "1h")
    assert (short.exit_code, names(config)) == (2, before)
    assert "24 h" in short.stderr
    assert run(config, "--grace", "soon").exit_code == 2
    other = with_changes(config, task__checkpoint__topic=f"{config.job_name}-other")
    unknown = run(other)
    assert (unknown.exit_code, names(config)) == (4, before)

    part = next(name for name in sorted(referenced(config)) if ".sst" in name)
    with JobReader(config) as reader:
        index = reader.index(TASK, "totals")
    services.blobs().delete(part)
    missing = run(config, "--json", "--write")
    assert (missing.exit_code, json.loads(missing.stdout)["missing"]) == (4, [part])
    assert part in run(config, "--write").stderr
    assert names(config) == before - {part}
    index_blob = f"{config.job_name}/1/Partition_0/totals/{index.attempt}/index"
    services.blobs().delete(index_blob)
    lost = run(config, "--write")
    assert lost.exit_code == 4
    assert index_blob in lost.stderr
    assert names(config) == before - {part, index_blob}
    services.close()


def test_published_blobs_with_a_ttl_are_fixed(mapping: Mapping, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULT 34, protocol 8: if the owner died before it removed the TTLs and nobody opened the task again, `gc --fix`
    removes them."""
    config = JobConfig.from_mapping(mapping(backup=("blob-store",)))
    with monkeypatch.context() as patch:
        patch.setattr("statemgr.flows.committing.clean_up.CleanUp.after_publish", lambda *_: None)
        commit(config, {b"a": random.Random(1).randbytes(100_000)}, 1)
    needed = referenced(config)
    assert json.loads(run(config, "--json").stdout)["expiring"] == [], "its owner may be at it"
    time_passes(monkeypatch)
    found = run(config, "--json")
    assert (found.exit_code, set(json.loads(found.stdout)["expiring"])) == (1, needed)
    assert "--fix" in run(config).stderr
    fixed = run(config, "--fix", "--write", "--json")
    assert (fixed.exit_code, set(json.loads(fixed.stdout)["fixed"])) == (0, needed)
    assert json.loads(run(config, "--json").stdout)["expiring"] == []
    services = open_services(config)
    assert all(services.blobs().stat(name).expires_ms is None for name in needed)
    services.close()


def test_unfinished_multipart_uploads_are_aborted(
    kafka: KafkaServer, s3: S3Server, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 2: garbage collection aborts the uploads below the job's own prefix after the grace period."""
    if s3.server == "moto":
        pytest.skip("to moto every upload was begun in 2010")
    mapping = job_mapping(kafka, tmp_path, s3=s3, backup=("blob-store",))
    config = JobConfig.from_mapping(mapping | {"blob.store.s3.path.style": True})
    commit(config, {b"a": b"1"}, 1)
    client = s3.client()
    prefix = str(mapping["blob.store.uri"]).removeprefix(f"s3://{s3.bucket}/")
    key = f"{prefix}/{config.job_name}/1/Partition_0/totals/a/0"
    for name in (key, f"{prefix}/elsewhere"):
        client.create_multipart_upload(Bucket=s3.bucket, Key=name)

    def uploads() -> list[str]:
        found = client.list_multipart_uploads(Bucket=s3.bucket, Prefix=f"{prefix}/").get("Uploads", [])
        return sorted(upload["Key"] for upload in found)

    assert len(uploads()) == 2
    assert json.loads(run(config, "--json", "--write").stdout)["unfinished"] == 0
    time_passes(monkeypatch)
    assert json.loads(run(config, "--json").stdout)["unfinished"] == 1
    assert json.loads(run(config, "--json", "--write").stdout)["abandoned"] == 1
    assert uploads() == [f"{prefix}/elsewhere"]


def test_a_collection_beside_a_long_commit_leaves_it_alone(
    kafka: KafkaServer, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 38, invariant 3: uploads that wait for their publish count as young, and a commit that waited too long is
    refused."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",)))
    commit(config, {b"a": b"1"}, 1)
    large = random.Random(1).randbytes(200_000)
    waits, go_on = threading.Event(), threading.Event()
    later_ns = [0]
    ids = IdSource(lambda: time.time_ns() + later_ns[0], lambda: secrets.token_hex(16))
    monkeypatch.setattr("statemgr.wiring.system_ids", lambda: ids)

    def hold(phase: Phase, subject: str) -> None:
        if phase is Phase.PREPARED and not waits.is_set():
            waits.set()
            assert go_on.wait(60)

    with StateManager(config) as manager, manager.open_task(TASK) as task, observed(hold):
        write(task, {b"b": large})
        future = task.commit_async({"orders-0": 2})
        assert waits.wait(30)
        waiting = blob_files(tmp_path) - referenced(config)
        assert len(waiting) >= 2
        # half a day later a collection still does not see garbage, but the commit can no longer be published
        with monkeypatch.context() as patch:
            time_passes(patch, DAY_MS // 2 + 60_000)
            found = json.loads(run(config, "--json", "--write").stdout)
            assert (found["young"]["blobs"], found["deleted"]["blobs"]) == (len(waiting), 0)
            later_ns[0] = (DAY_MS // 2 + 60_000) * 1_000_000
            go_on.set()
            with pytest.raises(RetryableError, match="garbage"):
                future.result(30)
            later_ns[0] = 0
        with monkeypatch.context() as patch:
            time_passes(patch)
            assert json.loads(run(config, "--json", "--write").stdout)["deleted"]["blobs"] == len(waiting)
        with pytest.raises(RetryableError, match="garbage"):
            task.commit({"orders-0": 3})  # the next commit also reports the outcome of an asynchronous commit
        task.commit({"orders-0": 4})
    assert totals(config, "blob-store")[TASK] == {b"a": b"1", b"b": large}
    assert blob_files(tmp_path) == referenced(config)


class LiveJob:
    """A publisher at full speed on its own thread, which retains one checkpoint and deletes the previous one."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.commits = 0
        self.failures: list[BaseException] = []
        self._stop = threading.Event()
        self._worker = threading.Thread(target=self._work)

    def _work(self) -> None:
        try:
            with StateManager(self.config) as manager, manager.open_task(TASK) as task:
                while not self._stop.is_set():
                    number = self.commits + 1
                    write(task, {b"%d" % (number % 7): random.Random(number).randbytes(20_000)})
                    task.commit({"orders-0": number})
                    self.commits = number
        except BaseException as error:
            self.failures.append(error)

    def expected(self) -> dict[bytes, bytes]:
        """The state after its commits."""
        return {b"%d" % (n % 7): random.Random(n).randbytes(20_000) for n in range(1, self.commits + 1)}

    @property
    def is_alive(self) -> bool:
        """Whether it still publishes."""
        return self._worker.is_alive()

    def __enter__(self) -> LiveJob:
        self._worker.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._worker.join(60)


def plant_orphan(directory: Path, config: JobConfig, name: str) -> Path:
    """Create an old index that nothing refers to."""
    orphan = directory / "blobs" / config.job_name / "1" / "Partition_0" / "totals" / name / "index"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"x")
    os.utime(orphan, (1_700_000_000, 1_700_000_000))
    return orphan


def live_config(kafka: KafkaServer, directory: Path, interval: str) -> JobConfig:
    """A job whose only retained checkpoint is dropped at the next commit."""
    mapping = job_mapping(kafka, directory, backup=("blob-store",), task__checkpoint__retained=1)
    return JobConfig.from_mapping(mapping | {"task.commit.snapshot.interval": [interval]})


@pytest.mark.parametrize("interval", [pytest.param("1 commit", marks=pytest.mark.long), "4 commits"])
def test_a_live_job_loses_nothing(
    kafka: KafkaServer, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, interval: str
) -> None:
    """FAULT 38, invariants 3 and 11: collections that run again and again in parallel with commits, snapshots and
    clean-ups lose no state.

    The stores' clock is ahead, so that everything older than a minute counts as old.
    """
    config = live_config(kafka, tmp_path, interval)
    commit(config, {b"start": b"1"}, 0)
    time_passes(monkeypatch, DAY_MS - 60_000)
    with LiveJob(config) as live:
        planted = deleted = 0
        while (planted < 6 or live.commits < 20) and live.is_alive:
            orphan = plant_orphan(tmp_path, config, f"killed-{planted}")
            done = run(config, "--json", "--write")
            assert done.exit_code == 0, done.output
            planted += 1
            deleted += json.loads(done.stdout)["deleted"]["blobs"]
            # it stays only if the job was too fast, which the output notes
            assert not orphan.exists() or json.loads(done.stdout)["notes"]
    deleted += json.loads(run(config, "--json", "--write").stdout)["deleted"]["blobs"]
    assert deleted == planted
    assert live.failures == []
    assert live.commits >= 20
    assert totals(config, "blob-store")[TASK] == live.expected() | {b"start": b"1"}
    # a snapshot that no commit has taken up expires
    assert blob_files(tmp_path, expiring=False) == referenced(config)


@pytest.mark.parametrize("interval", ["1 commit", pytest.param("4 commits", marks=pytest.mark.long)])
def test_a_job_that_publishes_faster_than_it_can_be_read_stops_no_collection(
    kafka: KafkaServer, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, interval: str
) -> None:
    """FAULT 38, invariants 3 and 11: if reading the blob store takes longer than a commit, the index that the topic
    names is nearly always evicted before it is read. Every collection still ends, and deletes nothing that is
    needed."""
    config = live_config(kafka, tmp_path, interval)
    # an old blob that every later checkpoint carries forward
    commit(config, {b"start": random.Random(0).randbytes(100_000)}, 0)
    for blob in blob_files(tmp_path):
        os.utime(tmp_path / "blobs" / blob, (1_700_000_000, 1_700_000_000))
    time_passes(monkeypatch, DAY_MS - 60_000)
    get = FileBlobStore.get

    def slow(self: FileBlobStore, *arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.05)
        return get(self, *arguments)

    monkeypatch.setattr(FileBlobStore, "get", slow)
    with LiveJob(config) as live:
        ended = 0
        while (ended < 2 or live.commits < 20) and live.is_alive:
            plant_orphan(tmp_path, config, f"killed-{ended}")
            done = run(config, "--json", "--write")
            assert done.exit_code == 0, done.output
            ended += 1
    assert live.failures == []
    monkeypatch.setattr(FileBlobStore, "get", get)
    assert totals(config, "blob-store")[TASK] == live.expected() | {b"start": random.Random(0).randbytes(100_000)}
    assert run(config, "--json", "--write").exit_code == 0
    assert not [name for name in blob_files(tmp_path) if "/killed-" in name], "garbage goes when it is quiet"
    assert blob_files(tmp_path, expiring=False) == referenced(config)
