"""``statemgr copy``: a new job gets the state of another job at a checkpoint, in every backend."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from statemgr import JobConfig, StateManager
from statemgr.blobs.file import FileBlobStore
from statemgr.blobs.memory import MemoryBlobStore
from statemgr.blobs.s3.store import S3BlobStore
from statemgr.cli.main import cli
from statemgr.engine import MicroBatch, read_attachment
from statemgr.operations.copy.blobs import BlobCopies, published_blob
from statemgr.phases import Phase, observed
from statemgr.ports import BlobInfo, no_progress
from statemgr.wiring import open_services
from tests.cli.test_running_job import write_toml
from tests.commits import TASK, attempt, blob_files, check_blobs, commit, current, referenced, totals
from tests.core.integration.test_scenarios_versions import job as old_job
from tests.core.integration.test_scenarios_versions import older_software
from tests.histories import OTHER, check_state, history, identity_of, job
from tests.jobs import DUAL, SEGMENTS, SNAPSHOTS, contents, elsewhere, with_changes
from tests.kafka_jobs import committed, make_topics, send, state_of
from tests.servers import KafkaServer, S3Server

Run = Callable[..., Result]
#: Backends and kinds of commits of a job.
FROM = [(("kafka-changelog",), SNAPSHOTS), (("blob-store",), SNAPSHOTS), (("blob-store",), SEGMENTS), (DUAL, SEGMENTS)]
TO = [("kafka-changelog",), ("blob-store",), DUAL]
#: Each of them once. The long tests take all pairs.
QUICK = [(FROM[0], TO[1]), (FROM[1], TO[0]), (FROM[2], TO[1]), (FROM[3], TO[2])]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `statemgr copy … --json` from one job to another."""
    monkeypatch.chdir(tmp_path)

    def run_(source: JobConfig, target: JobConfig, *arguments: str) -> Result:
        write_toml(source, tmp_path / "job.toml")
        write_toml(target, tmp_path / "new.toml")
        return CliRunner().invoke(cli, ["copy", "--to", "new.toml", "--json", *arguments])

    return run_


def flipped(data: bytes) -> bytes:
    """Return the bytes with another first bit."""
    return bytes([data[0] ^ 1]) + data[1:]


def new_job(config: JobConfig, directory: Path, **changes: object) -> JobConfig:
    """The same configuration for another job, on another machine."""
    return with_changes(config, job__name=f"{config.job_name}-new", state__dir=str(directory / "new"), **changes)


def grown(config: JobConfig) -> dict[bytes, bytes]:
    """Commit states that do not fit into a checkpoint record, with old and new files and segments. Returns the last
    state."""
    rows = random.Random(1)
    state = {b"key-%05d" % number: rows.randbytes(100) for number in range(3000)}
    commit(config, state, 1)
    for number in range(2, 5):
        changed = {b"key-%05d" % (number * 100 + row): rows.randbytes(200) for row in range(80)}
        commit(config, {**changed, b"key-%05d" % number: None}, number)
        state = {k: v for k, v in (state | changed).items() if k != b"key-%05d" % number}
    return state


def check_independent(source: JobConfig, target: JobConfig, tasks: tuple[str, ...] = (TASK,)) -> None:
    """Check that everything the new job needs belongs to it, and that none of it will expire."""
    own = f"{target.job_name}/{target.job_id}/"
    for task in tasks:
        assert all(blob_id.startswith(own) for blob_id in referenced(target, task))
    check_blobs(target)
    assert committed(source, source.checkpoint_topic) != committed(target, target.checkpoint_topic)


def test_a_copy_of_what_older_software_wrote(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """A record of version 1 does not know how many tasks there are. Neither does the copy's first one, and so the new
    job opens it with its own number."""
    source = old_job(kafka, tmp_path, backup=("kafka-changelog",))
    commit(source, {b"a": b"1"}, 1)
    older_software(source, b"b", b"2", 2)
    target = new_job(source, tmp_path, task__checkpoint__write__versions=[2])
    done = run(source, target, "--write")
    assert done.exit_code == 0, done.output
    check_state(target, {b"a": b"1", b"b": b"2"})
    commit(target, {b"c": b"3"}, 3)


def test_what_an_earlier_run_left_is_asked_for_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If listings tell no TTLs, the search for a published blob asks for several at a time and stops soon. What is used
    again is known from the listing."""
    config = JobConfig.from_mapping(
        {
            "job.name": "new",
            "kafka.bootstrap.servers": "none",
            "blob.store.uri": f"memory://{tmp_path.name}",
            "state.dir": str(tmp_path),
            "stores.totals.type": "memory",
        }
    )
    services = open_services(config)
    names = [f"new/{config.job_id}/{number:04}" for number in range(1000)]
    for number, name in enumerate(names):
        services.blobs().put(name, b"-", ttl_days=None if number == 10 else 1)
    asked: list[str] = []
    both, original = threading.Barrier(2, timeout=30), MemoryBlobStore.stat

    def stat(self: MemoryBlobStore, blob_id: str) -> BlobInfo:
        asked.append(blob_id)
        if blob_id in names[:2]:
            both.wait()
        return original(self, blob_id)

    monkeypatch.setattr(MemoryBlobStore, "stat", stat)
    monkeypatch.setattr(MemoryBlobStore, "listing_tells_ttl", False)
    found = published_blob(services)
    assert found is not None
    assert found.blob_id == names[10]
    assert len(asked) < len(names)
    asked.clear()
    copies = {name: name for name in names}
    moved, _ = BlobCopies(services, services, copies, dict.fromkeys(names, ())).run([], no_progress)
    assert (moved.found, sorted(asked)) == (len(names), names)
    services.close()


@pytest.mark.parametrize(
    ("backup", "kind", "to"),
    [pytest.param(*of, to, marks=() if (of, to) in QUICK else pytest.mark.long) for of in FROM for to in TO],
)
def test_a_copy_is_exact_and_goes_its_own_way(
    kafka: KafkaServer, tmp_path: Path, run: Run, backup: tuple[str, ...], kind: str, to: tuple[str, ...]
) -> None:
    """A copy between any two backends has the same state and offsets, and each job continues on its own afterwards."""
    source = job(kafka, tmp_path, backup=backup, kind=kind)
    states = history(source)
    target = new_job(source, tmp_path, task__backup__factories=list(to), task__restore__factories=list(to))
    before = committed(source, source.checkpoint_topic), blob_files(tmp_path)
    looked = run(source, target)
    assert looked.exit_code == 0, looked.output
    assert json.loads(looked.stdout)["written"] is False
    assert (committed(source, source.checkpoint_topic), blob_files(tmp_path)) == before
    done = json.loads(run(source, target, "--write").stdout)
    assert done["input_offsets"] == {"orders-0": 3}
    ways = {one["factory"]: one["way"] for one in done["tasks"][0]["stores"]}
    assert ways == {factory: "copy" if factory == "blob-store" and factory in backup else "fill" for factory in to}
    check_state(target, states[-1])
    check_independent(source, target)
    record = current(target)
    assert record is not None
    assert (record.current.sequence, len(record.checkpoints)) == (1, 1)
    for number, factory in enumerate(to):
        assert contents(elsewhere(target, tmp_path / f"there-{number}", factory)) == (
            {"totals": states[-1]},
            {"orders-0": 3},
        )
    commit(target, {b"only-new": b"1", b"same": None}, 9)
    commit(source, {b"only-old": b"1"}, 4)
    commit(source, {b"only-old": b"2"}, 5)
    expected = {k: v for k, v in states[-1].items() if k != b"same"} | {b"only-new": b"1"}
    check_state(target, expected)
    check_state(source, states[-1] | {b"only-old": b"2"})
    refused = run(source, target, "--write")
    assert refused.exit_code == 2
    assert "is not new" in refused.stderr


@pytest.mark.long
@pytest.mark.parametrize("kind", [SNAPSHOTS, SEGMENTS])
def test_the_server_copies_within_a_bucket(
    kafka: KafkaServer, s3: S3Server, tmp_path: Path, run: Run, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On S3 no byte of the data passes through this machine, also for an older checkpoint of several tasks."""
    source = job(kafka, tmp_path, backup=("blob-store",), kind=kind, s3=s3, tasks=2, stores__totals__type="rocksdb")
    data = {b"key-%04d" % number: bytes([number % 251]) * 200 for number in range(2000)}
    for number, task in enumerate((TASK, OTHER)):
        commit(source, data, {f"orders-{number}": 5}, task)
        commit(source, {b"second": b"2", b"key-0001": None}, {f"orders-{number}": 6}, task)
        commit(source, {b"third": b"3"}, {f"orders-{number}": 7}, task)
    target = new_job(source, tmp_path, blob__store__uri=f"s3://{s3.bucket}/{s3.fresh_prefix()}")
    ids = [identity_of(source, 1, task) for task in (TASK, OTHER)]
    done = run(source, target, "--write", "--checkpoint", ids[0], "--checkpoint", ids[1])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["blobs"]["streamed"] == 0
    assert found["blobs"]["inside"] > 0
    assert found["input_offsets"] == {"orders-0": 6, "orders-1": 6}
    expected = {k: v for k, v in data.items() if k != b"key-0001"} | {b"second": b"2"}
    assert totals(target, "blob-store") == {TASK: expected, OTHER: expected}
    check_independent(source, target, (TASK, OTHER))
    commit(target, {b"on": b"1"}, {"orders-1": 8}, OTHER)
    assert totals(target, "blob-store") == {TASK: expected, OTHER: expected | {b"on": b"1"}}


def test_another_store_is_streamed(kafka: KafkaServer, s3: S3Server, tmp_path: Path, run: Run) -> None:
    """The data is streamed from a directory to S3, and back to another job in the directory, without any change."""
    source = job(kafka, tmp_path, backup=("blob-store",), kind=SEGMENTS, blob__store__compression="zstd")
    state = grown(source)
    mapping = job(kafka, tmp_path, s3=s3).to_mapping()
    there = {key: value for key, value in mapping.items() if key.startswith("blob.store.")}
    target = JobConfig.from_mapping({**new_job(source, tmp_path).to_mapping(), **there})
    found = json.loads(run(source, target, "--write").stdout)
    assert found["blobs"]["inside"] == 0
    assert found["blobs"]["streamed"] > 0
    check_state(target, state)
    back = with_changes(source, job__name=f"{source.job_name}-back", state__dir=str(tmp_path / "back"))
    assert json.loads(run(target, back, "--write").stdout)["blobs"]["streamed"] > 0
    check_state(back, state)


@pytest.mark.parametrize("kind", [SNAPSHOTS, pytest.param(SEGMENTS, marks=pytest.mark.long)])
def test_a_file_store_copies_by_hard_link(kafka: KafkaServer, tmp_path: Path, run: Run, kind: str) -> None:
    """The copy takes no space, and outlives the source's clean-up."""
    source = job(kafka, tmp_path, backup=("blob-store",), kind=kind, task__checkpoint__retained=1)
    state = grown(source)
    target = new_job(source, tmp_path)
    found = json.loads(run(source, target, "--write").stdout)
    assert found["blobs"]["inside"] == found["tasks"][0]["stores"][0]["blobs"] > 2
    own = tmp_path / "blobs" / target.job_name
    shared = [path for path in own.rglob("*") if path.is_file() and path.stat().st_nlink > 1]
    assert len(shared) == found["blobs"]["inside"]
    there = [name for name in blob_files(tmp_path) if name.startswith(f"{target.job_name}/")]
    assert len(there) == found["blobs"]["inside"] + found["blobs"]["written"], "the index is new"
    grown(source)
    if kind == SNAPSHOTS:
        assert any(path.stat().st_nlink == 1 for path in shared), "the source has deleted its own names of some"
    check_state(target, state)
    check_independent(source, target)


def test_a_damaged_part_of_a_shared_blob_is_found(
    kafka: KafkaServer, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stores share a blob, and a byte of the first one is wrong. A copy that reads the blob compares the bytes of
    each store, and takes the state from elsewhere: from this machine's own copies."""
    source = job(kafka, tmp_path, backup=("blob-store",), kind=SEGMENTS, stores__names__value__serde="bytes")
    rows = {b"key-%d" % number: random.Random(number).randbytes(50_000) for number in range(3)}
    with StateManager(source) as manager, manager.open_task(TASK) as task:
        for number, (key, value) in enumerate(rows.items()):
            for store in ("totals", "names"):
                task.store(store).put(key, value)
            task.commit({"orders-0": number})
    shared = max(path for path in (tmp_path / "blobs").rglob("*") if "_segments" in path.parts and path.is_file())
    shared.write_bytes(flipped(shared.read_bytes()))
    monkeypatch.setattr(FileBlobStore, "copy_from", lambda *_, **more: False)
    target = new_job(source, tmp_path)
    done = run(source, target, "--write")
    assert done.exit_code == 0, done.output
    there = elsewhere(target, tmp_path / "there", "blob-store")
    assert contents(there)[0] == {"totals": rows, "names": rows}


def test_micro_batches_keep_their_output(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """The copy has the checkpoint's micro-batch and its output rows. A query that also reads files cannot continue."""
    source = job(kafka, tmp_path, tasks=2)
    output = b"row" * 50_000
    batch = MicroBatch("query", 0, "{}", '{"source 0":"1"}', 77)
    with StateManager(source, "spark-hash(string)") as driver:
        epoch = driver.acquire()
        driver.publish(
            [attempt(source, epoch, task, {b"by": b"0"}, 0, {"output": output}) for task in (TASK, OTHER)], batch
        )
    target = new_job(source, tmp_path)
    done = run(source, target, "--write")
    assert done.exit_code == 0, done.output
    assert "a source other than Kafka, and cannot continue" in done.stderr
    with StateManager(target, "spark-hash(string)") as driver:
        epoch = driver.acquire()
        for checkpoint in epoch.checkpoints.values():
            assert checkpoint is not None
            assert (checkpoint.batch, checkpoint.output_sequence) == (batch, 1)
            attached = next(one for one in checkpoint.attachments if one.name == "output")
            assert attached.blob is not None
            assert read_attachment(target, attached) == output
        later = [attempt(target, epoch, task, {b"by": b"1"}, 1, {"output": output}) for task in (TASK, OTHER)]
        published = driver.publish(later, MicroBatch("query", 1, "1", "2", 78))
    assert all(one.output_sequence > 1 for one in published.values()), "an output takes a number that it has for known"
    check_independent(source, target, (TASK, OTHER))


def test_tasks_that_commit_one_by_one(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """Each task has checkpoints of its own. With the checkpoint of one of them, the command says how to name both, and
    nothing about going back: that would fence the source."""
    source = job(kafka, tmp_path, tasks=2)
    for number, task in enumerate((TASK, OTHER)):
        commit(source, {b"a": b"1"}, {f"orders-{number}": 1}, task)
    ids, target = [identity_of(source, 0, task) for task in (TASK, OTHER)], new_job(source, tmp_path)
    refused = run(source, target, "--checkpoint", ids[1])
    assert refused.exit_code == 4
    assert f"--checkpoint {ids[1]} --checkpoint {ids[0]}" in refused.stderr
    assert "rollback" not in refused.stderr
    assert run(source, target, "--checkpoint", ids[1], "--checkpoint", ids[0]).exit_code == 0


def test_what_is_refused(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """The command refuses a job that is not new in some respect or whose configuration does not fit, and writes
    nothing."""
    source = job(kafka, tmp_path)

    def refused(target: JobConfig, expected: str = "is not new") -> None:
        before = blob_files(tmp_path)
        for arguments in ((), ("--write",)):
            refusal = run(source, target, *arguments)
            assert refusal.exit_code in (2, 4)
            assert expected in refusal.stderr
        assert blob_files(tmp_path) == before

    def named(what: str) -> JobConfig:
        return with_changes(new_job(source, tmp_path), job__name=f"{source.job_name}-{what}")

    make_topics(source)
    refused(named("new"), "no checkpoint to copy")
    history(source)
    # its checkpoint topic, changelog and blobs differ: a copy would fence the job itself
    more = {"task__checkpoint__topic": "checkpoints", "stores__totals__changelog__topic": "changelog"}
    topics = {key: kafka.fresh_name(topic) for key, topic in more.items()}
    uri = (tmp_path / "more").as_uri()
    itself = with_changes(named("new"), job__name=source.job_name, blob__store__uri=uri, **topics)
    refused(itself, "the name and the ID of the job itself")
    shared = source.stores["totals"].changelog_topic
    refused(with_changes(named("new"), stores__totals__changelog__topic=shared), "has the changelog of the job itself")
    refused(with_changes(named("new"), job__tasks=2), "set job.tasks = 1")
    refused(with_changes(named("new"), stores__more__type="rocksdb"), "configure the same stores")
    refused(with_changes(named("new"), stores__totals__type="memory"), "set the same one")
    commit(named("checkpoint"), {b"a": b"1"}, 1)
    refused(named("checkpoint"))
    path = tmp_path / "blobs" / named("blob").job_name / "1" / "Partition_0" / "totals" / "attempt" / "index"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    refused(named("blob"))
    target = named("changelog")
    make_topics(target)
    send(target, target.stores["totals"].changelog_topic, [(b"k", b"v")])
    refused(target)


def test_lost_blobs_are_written_again(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """If part of the source's snapshot is missing, the changelog supplies the state and the new snapshot is
    complete."""
    source = job(kafka, tmp_path, kind=SNAPSHOTS)
    data: Mapping[bytes, bytes | None] = {b"%05d" % number: b"v" * 100 for number in range(3000)}
    commit(source, data, 1)
    lost = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file() and path.name != "index"]
    lost[0].unlink()
    target = new_job(source, tmp_path)
    done = run(source, target, "--write")
    assert done.exit_code == 0, done.output
    assert {one["way"] for one in json.loads(done.stdout)["tasks"][0]["stores"]} == {"fill"}
    check_state(target, dict(data))  # type: ignore[arg-type]


@pytest.mark.parametrize("backup", [("blob-store",), DUAL], ids=["blobs", "dual"])
def test_a_blob_of_another_size_is_not_copied(
    kafka: KafkaServer, tmp_path: Path, run: Run, backup: tuple[str, ...]
) -> None:
    """If a blob of the source is shorter than it should be, the changelog supplies the state, or nothing is
    published."""
    source = job(kafka, tmp_path, backup=backup, kind=SNAPSHOTS)
    state = grown(source)
    table = max((tmp_path / "blobs" / name for name in referenced(source)), key=lambda path: path.stat().st_size)
    os.truncate(table, table.stat().st_size - 1)
    target = new_job(source, tmp_path)
    done = run(source, target, "--write")
    if backup == DUAL:
        assert done.exit_code == 0, done.output
        check_state(target, state)
    else:
        assert done.exit_code == 4
        assert table.relative_to(tmp_path / "blobs").as_posix() in done.stderr
        assert not [name for name in blob_files(tmp_path, expiring=False) if name.startswith(target.job_name)]
        assert json.loads(run(source, target).stdout)["written"] is False, "the new job is still new"


def test_a_checkpoint_that_the_job_drops_meanwhile(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """The message says that the job dropped the checkpoint, not that a blob was lost. The next run copies the newer
    state."""
    source = job(kafka, tmp_path, backup=("blob-store",), kind=SNAPSHOTS, task__checkpoint__retained=1)
    target = new_job(source, tmp_path)
    state = grown(source)
    before = blob_files(tmp_path)
    table = max(before, key=lambda name: (tmp_path / "blobs" / name).stat().st_size)

    def go_on(phase: Phase, subject: str) -> None:
        if phase is Phase.FENCE and not seen:
            seen.append(subject)
            with StateManager(source) as manager, manager.open_task(TASK) as task:
                task.store("totals").put(b"new", b"1")
                task._stores["totals"].local.compact()  # type: ignore[attr-defined]
                task.commit({"orders-0": 9})
            assert table not in referenced(source)
            for name in before - referenced(source):
                (tmp_path / "blobs" / name).unlink(missing_ok=True)

    seen: list[str] = []
    there = with_changes(source, state__dir=str(tmp_path / "operator"))  # without the job's local copies
    with observed(go_on):
        failed = run(there, target, "--write")
    assert (failed.exit_code, len(seen)) == (4, 1)
    assert "has dropped checkpoint" in failed.stderr
    assert "raise task.checkpoint.retained" in failed.stderr  # `checkpoints tag` would end the running job
    assert run(there, target, "--write").exit_code == 0
    assert contents(target) == ({"totals": {**state, b"new": b"1"}}, {"orders-0": 9})


def test_stores_say_what_they_cannot_copy(kafka: KafkaServer, s3: S3Server, tmp_path: Path) -> None:
    """Blob stores refuse a store of another kind and a missing blob, and the file store a name that is taken."""
    from statemgr.blobs import open_raw_blob_store
    from statemgr.blobs.names import BlobExists
    from statemgr.errors import MissingBlob
    from statemgr.local.machine import SystemClock

    here = open_raw_blob_store(job(kafka, tmp_path), SystemClock())
    there = open_raw_blob_store(job(kafka, tmp_path, s3=s3), SystemClock())
    assert isinstance(here, FileBlobStore)
    assert isinstance(there, S3BlobStore)
    for store, other in ((here, there), (there, here)):
        store.put("job/1/a", b"bytes", ttl_days=None)
        found = store.stat("job/1/a")
        assert not store.copy_from(other, found, "job/1/b", ttl_days=1)
        assert store.copy_from(store, found, "job/1/b", ttl_days=1)
        assert store.stat("job/1/b").size == 5
        assert store.stat("job/1/b").expires_ms is not None
        assert store.stat("job/1/a").expires_ms is None
        with pytest.raises(MissingBlob):
            store.copy_from(store, BlobInfo("job/1/missing", 5, 0), "job/1/c", ttl_days=1)
        store.close()
    with pytest.raises(BlobExists):
        here.copy_from(here, here.stat("job/1/a"), "job/1/b", ttl_days=1)


def test_the_bucket_copies_a_large_object_in_parts(
    kafka: KafkaServer, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of an object above the limit of one request has the same bytes and a TTL, and a failure leaves no
    upload."""
    from statemgr.blobs import open_raw_blob_store
    from statemgr.blobs.s3 import copying
    from statemgr.errors import MissingBlob
    from statemgr.local.machine import SystemClock

    least = 5 * 1024 * 1024  # the smallest size of a part that is not the last one
    monkeypatch.setattr(copying, "_MOST", least)
    monkeypatch.setattr(copying, "_PART", least)
    store = open_raw_blob_store(job(kafka, tmp_path, s3=s3), SystemClock())
    assert isinstance(store, S3BlobStore)
    data = random.Random(1).randbytes(2 * least + 1)
    for name, content in {"job/1/small": data[:least], "job/1/large": data, "job/1/two": data[: 2 * least]}.items():
        store.put(name, content, ttl_days=None)
        assert store.copy_from(store, store.stat(name), f"{name}-copy", ttl_days=1)
        with store.get(f"{name}-copy") as reader:
            buffer = bytearray(len(content) + 1)
            view, read = memoryview(buffer), 0
            while size := reader.readinto(view[read:]):
                read += size
        assert bytes(buffer[:read]) == content
        assert store.stat(f"{name}-copy").expires_ms is not None
        assert store.stat(name).expires_ms is None
    with pytest.raises(MissingBlob):
        store.copy_from(store, BlobInfo("job/1/missing", len(data), 0), "job/1/c", ttl_days=1)
    assert not list(store.administration.unfinished("job/1/"))
    store.close()


def test_the_changelog_of_a_copy_has_the_state_alone(kafka: KafkaServer, tmp_path: Path, run: Run) -> None:
    """The changelog has one record for each key, and no tombstone."""
    source = job(kafka, tmp_path, backup=("blob-store",), kind=SEGMENTS)
    state = history(source)[-1]
    target = new_job(source, tmp_path, task__backup__factories=list(DUAL))
    assert run(source, target, "--write").exit_code == 0
    records = committed(target, target.stores["totals"].changelog_topic)
    assert len(records) == len(state)
    assert state_of(records) == state
