"""`statemgr materialize` builds first snapshots next to a running job, and the job's owner adopts them."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from statemgr import JobConfig, StateManager
from statemgr.blobs.file import FileBlobStore
from statemgr.cli.main import cli
from statemgr.errors import AccessDenied, InvalidError, MissingState, UnavailableError
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.kafka.plain_writes import withdraw_offers, write_offer
from statemgr.local import durable
from statemgr.local.rocksdb import bulk
from statemgr.local.rocksdb import options as rocksdb_options
from statemgr.model.checkpoint import BlobMarker
from statemgr.operations.materialize import build
from statemgr.operations.materialize.tasks import materialize_task
from statemgr.phases import Phase, observed
from statemgr.reader import JobReader
from tests.commits import TASK, attempt, blob_files, commit, current, failing, referenced, totals, write
from tests.jobs import contents, elsewhere, with_changes
from tests.kafka_jobs import delete_records, recreate
from tests.offers import BLOBS, CHANGELOG, materialize, offers, run, stage_one, stage_two, write_file
from tests.servers import KafkaServer, S3Server

RANDOM = random.Random(12)
ROWS: dict[bytes, bytes | None] = {b"key-%04d" % number: RANDOM.randbytes(200) for number in range(500)}
DAY_MS = 24 * 3600 * 1000
SOME = dict(list(ROWS.items())[:100])


@pytest.fixture
def config(kafka: KafkaServer, tmp_path: Path) -> JobConfig:
    """Create a job with changelogs only: 500 rows, of which 100 were deleted."""
    found = stage_one(kafka, tmp_path)
    commit(found, ROWS, 500)
    commit(found, dict.fromkeys(SOME), 600)
    return found


def adopted(config: JobConfig) -> BlobMarker:
    """Open the job in stage 2 and close it again without a commit. Returns: the marker of the adopted offer."""
    dual = stage_two(config)
    with StateManager(dual) as manager, manager.open_task(TASK):
        pass
    record = current(config)
    assert record is not None
    marker = record.current.marker(BLOBS, "totals")
    assert isinstance(marker, BlobMarker)
    return marker


def chain_of(config: JobConfig) -> tuple[str, int]:
    """Return the index blob of the published snapshot, and the number of segments after it."""
    record = current(config)
    assert record is not None
    marker = record.current.marker(BLOBS, "totals")
    assert marker is not None
    with JobReader(stage_two(config)) as reader:
        chain = reader.chain(TASK, "totals", marker)
    return chain.snapshot.index.blob_id, len(chain.segments)


def collect(config: JobConfig, directory: Path, *arguments: str) -> dict[str, Any]:
    """Run `statemgr gc` and return its report."""
    path = str(write_file(config, directory))
    result = CliRunner().invoke(cli, ["gc", "--config", path, "--json", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_owner_begins_with_the_offer(config: JobConfig, tmp_path: Path) -> None:
    """The owner's chain is the offered snapshot plus the later changes of the changelog, deletes included. The owner
    does not upload the complete state."""
    (report,) = materialize(config, tmp_path)
    assert (report["result"], report["records"]) == ("offered", 600)
    ((key, offer),) = offers(config).items()
    later: dict[bytes, bytes | None] = {b"key-0000": b"again", b"key-0200": None, b"new": b"1", b"key-0499": b"changed"}
    commit(config, later, 700)
    commit(config, {b"key-0000": None}, 701)
    offered = blob_files(tmp_path)
    assert offered == blob_files(tmp_path, expiring=True)  # they keep their TTL until the owner adopts the offer

    adopted(config)
    expected = totals(config, CHANGELOG)
    assert len(expected[TASK]) == 500 - 100 - 1 + 1
    assert totals(config, BLOBS) == expected
    assert chain_of(config) == (offer.index.blob_id, 1)
    assert not blob_files(tmp_path, expiring=True)
    assert blob_files(tmp_path) >= offered
    assert offers(config) == {}
    record = current(config)
    assert record is not None
    assert record.current.input_offsets == {"orders-0": 701}
    assert key.attempt in offer.index.blob_id

    dual = stage_two(config)
    commit(dual, {b"more": b"1", b"key-0100": None}, 800)
    assert chain_of(config) == (offer.index.blob_id, 2)
    moved = elsewhere(dual, tmp_path / "other", [BLOBS])
    commit(moved, {b"more": None}, 801)  # it continues from the blobs alone
    assert totals(config, BLOBS) == totals(config, CHANGELOG)
    assert not blob_files(tmp_path, expiring=True)


@pytest.mark.parametrize("backup", [[BLOBS], [CHANGELOG, BLOBS]])
def test_an_offer_for_one_of_two_stores(kafka: KafkaServer, tmp_path: Path, backup: list[str]) -> None:
    """An owner adopts it only if each store then has a backup. If only a changelog that the configuration has
    left has the other store, a commit has to fill the blobs first."""
    config = stage_one(kafka, tmp_path, stores=("totals", "other"))
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        task.store("totals").put(b"a", b"1")
        task.store("other").put(b"b", b"2")
        task.commit({"orders-0": 1})
    (report,) = materialize(config, tmp_path, "--store", "totals")
    assert report["result"] == "offered"
    later = with_changes(config, task__backup__factories=backup, task__restore__factories=[CHANGELOG, BLOBS])
    with StateManager(later) as manager, manager.open_task(TASK):
        pass
    record = current(config)
    assert record is not None
    assert (record.current.marker(BLOBS, "totals") is not None) == (CHANGELOG in backup)
    expected = {"totals": {b"a": b"1"}, "other": {b"b": b"2"}}
    moved = elsewhere(later, tmp_path / "other", [BLOBS, CHANGELOG])
    with StateManager(moved) as manager, manager.open_task(TASK) as task:
        assert {name: dict(task.store(name).range()) for name in expected} == expected
        task.commit({"orders-0": 2})
    assert contents(elsewhere(later, tmp_path / "third", [BLOBS])) == (expected, {"orders-0": 2})


def test_a_running_job_is_not_disturbed(config: JobConfig, tmp_path: Path) -> None:
    """The owner commits during the replay, the upload and the offer; it is not fenced, and the result is exact."""
    steps: list[str] = []
    with StateManager(config) as manager, manager.open_task(TASK) as task:

        def commit_too(phase: Phase, subject: str) -> None:
            if phase in (Phase.REPLAY, Phase.UPLOAD, Phase.OFFER) and threading.current_thread() is main:
                steps.append(phase.name)
                number = 600 + len(steps)
                write(task, {b"during": b"%d" % number, b"key-%04d" % number: None, b"key-0%d" % number: b"x"})
                task.commit({"orders-0": number})

        main = threading.current_thread()
        with observed(commit_too):
            (done,) = materialize_task(config, TASK)
        assert done.offered
        assert steps == ["REPLAY", "UPLOAD", "OFFER"]
        task.store("totals").put(b"after", b"1")
        task.commit({"orders-0": 999})
    adopted(config)
    found = totals(config, BLOBS)
    assert found == totals(config, CHANGELOG)
    assert found[TASK][b"during"] == b"603"


def test_a_job_that_commits_all_the_time(config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow replay keeps reading the newest checkpoint until it has caught up."""
    monkeypatch.setattr(build, "_NEW_S", 0.3)
    monkeypatch.setattr(build, "NOTE_S", 0.0)
    stop = threading.Event()
    commits = 0
    with StateManager(config) as manager, manager.open_task(TASK) as task:

        def work() -> None:
            nonlocal commits
            while not stop.is_set():
                commits += 1
                write(task, {b"key-%04d" % (commits % 450): b"%d" % commits, b"key-%04d" % (commits % 397): None})
                task.commit({"orders-0": 1000 + commits})

        thread = threading.Thread(target=work)
        thread.start()
        try:
            (done,) = materialize_task(config, TASK)
        finally:
            stop.set()
            thread.join()
    assert done.offered
    assert commits > 3
    adopted(config)
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_an_idle_job_has_time_to_adopt(config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest checkpoint of an idle job may be old. The offer's time starts when the command reads it."""
    monkeypatch.setattr(build, "_RECENT_MS", -1)
    monkeypatch.setattr(build, "_TRANSACTION_MS", 0)
    monkeypatch.setattr(build, "MARGIN_MS", 0)
    record = current(config)
    assert record is not None
    assert record.current.published_ms is not None
    time.sleep(1)
    materialize_task(config, TASK)
    ((_, offer),) = offers(config).items()
    assert offer.as_of_ms >= record.current.published_ms + 1000
    commit(config, {b"key-0300": None}, 601)
    assert offer.as_of_ms < (current(config) or record).current.published_ms  # type: ignore[operator]
    adopted(config)
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


@pytest.mark.parametrize("compacted", [False, True])
def test_tables_are_uploaded_during_the_replay(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compacted: bool
) -> None:
    """Tables that stay are uploaded before the replay ends, and the snapshot refers to them. If the build compacts its
    tables at the end, it uploads nothing early. The state is exact in both cases."""
    config = stage_one(kafka, tmp_path)
    for number in range(4):
        commit(config, {b"%d-%04d" % (number, row): RANDOM.randbytes(3000) for row in range(2000)}, number + 1)
    monkeypatch.setattr(rocksdb_options, "_BULK_BUFFER", 3 * 1024 * 1024)
    monkeypatch.setattr(build, "LOOK_S", 0.0)
    if compacted:
        monkeypatch.setattr(bulk, "LEVEL0_LIMIT", 1)
    early: set[str] = set()

    def look(phase: Phase, subject: str) -> None:
        if phase is Phase.DIFF:
            early.update(blob_files(tmp_path))

    with observed(look):
        (done,) = materialize_task(config, TASK)
    assert bool(early) is not compacted
    assert early <= blob_files(tmp_path)
    ((_, offer),) = offers(config).items()
    with JobReader(config) as reader:
        index = reader.snapshot(TASK, "totals", offer.index)
    named = {blob.blob_id for blob in index.blobs()}
    assert all(any(path.endswith(name) for name in named) for path in early)
    assert done.uploaded >= done.size
    adopted(config)
    assert totals(config, BLOBS) == totals(config, CHANGELOG)
    assert not blob_files(tmp_path, expiring=True)


def test_a_replay_goes_on_while_nothing_can_be_uploaded(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that cannot be uploaded during the replay are uploaded at its end."""
    config = stage_one(kafka, tmp_path)
    commit(config, {b"%04d" % row: RANDOM.randbytes(3000) for row in range(4000)}, 1)
    monkeypatch.setattr(rocksdb_options, "_BULK_BUFFER", 3 * 1024 * 1024)
    monkeypatch.setattr(build, "LOOK_S", 0.0)
    phases: list[Phase] = []
    put = FileBlobStore.put

    def refused(self: FileBlobStore, *arguments: Any, **more: Any) -> None:
        if Phase.DIFF not in phases:
            raise AccessDenied("not now")
        put(self, *arguments, **more)

    monkeypatch.setattr(FileBlobStore, "put", refused)
    with observed(lambda phase, subject: phases.append(phase)):
        (done,) = materialize_task(config, TASK)
    assert done.offered
    adopted(config)
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_an_expired_offer_is_ignored(config: JobConfig, tmp_path: Path) -> None:
    """The next commit uploads the state as usual."""
    materialize(config, tmp_path)
    ((key, offer),) = offers(config).items()
    write_offer(config, key, replace(offer, expires_ms=offer.as_of_ms))
    commit(stage_two(config), {b"x": b"1"}, 601)
    assert chain_of(config)[0] != offer.index.blob_id
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_an_offer_of_another_layout_is_ignored(config: JobConfig, tmp_path: Path) -> None:
    """The tasks of another layout have other keys."""
    materialize(config, tmp_path)
    ((key, offer),) = offers(config).items()
    record = current(config)
    assert record is not None
    withdraw_offers(config, [key])
    write_offer(config, replace(key, layout_generation=record.layout.generation + 7), offer)
    commit(stage_two(config), {b"x": b"1"}, 601)
    assert chain_of(config)[0] != offer.index.blob_id


def test_an_offer_of_a_deleted_changelog_is_ignored(config: JobConfig, tmp_path: Path) -> None:
    """The new topic has the same name and offsets, but other records."""
    materialize(config, tmp_path)
    ((_, offer),) = offers(config).items()
    recreate(config, offer.changelog.topic)
    commit(config, {b"x": b"1"}, 601)  # fills the new topic from the local copy
    commit(stage_two(config), {b"y": b"1"}, 602)
    assert chain_of(config)[0] != offer.index.blob_id
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_an_offer_from_before_a_fill_is_ignored(config: JobConfig, tmp_path: Path) -> None:
    """A key that the changelog had lost has no delete in the fill, although a rollback may have taken the key back."""
    materialize(config, tmp_path)
    ((_, offer),) = offers(config).items()
    delete_records(config, offer.changelog.topic, 100)
    commit(config, {b"x": b"1"}, 601)  # fills the changelog from the local copy
    commit(stage_two(config), {b"y": b"1"}, 602)
    assert chain_of(config)[0] != offer.index.blob_id
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_an_offer_beyond_the_checkpoint_is_ignored(config: JobConfig, tmp_path: Path) -> None:
    """An offer can be beyond the checkpoint after a rollback of the changelog to an older state."""
    materialize(config, tmp_path)
    ((key, offer),) = offers(config).items()
    beyond = replace(offer.changelog, offset=offer.changelog.offset + 1000)
    write_offer(config, key, replace(offer, changelog=beyond))
    commit(stage_two(config), {b"x": b"1"}, 601)
    assert chain_of(config)[0] != offer.index.blob_id


def test_an_offer_that_has_lost_a_blob_is_not_adopted(config: JobConfig, tmp_path: Path) -> None:
    """Every blob that a checkpoint refers to exists when the checkpoint is published."""
    materialize(config, tmp_path)
    ((_, offer),) = offers(config).items()
    lost = max(blob_files(tmp_path) - {offer.index.blob_id})
    (tmp_path / "blobs" / lost).unlink()
    commit(stage_two(config), {b"x": b"1"}, 601)
    assert chain_of(config)[0] != offer.index.blob_id
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_the_newest_of_two_offers_is_adopted(
    config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adoption deletes both offers, and removes the TTL only from the blobs of the newest one. Garbage collection
    deletes those of the other."""
    materialize(config, tmp_path)
    commit(config, {b"between": b"1"}, 601)
    (report,) = materialize(config, tmp_path)
    assert (report["result"], len(offers(config))) == ("not needed", 1)
    (report,) = materialize(config, tmp_path, "--again")
    assert (report["result"], len(offers(config))) == ("offered", 2)
    other, newest = sorted(offers(config).values(), key=lambda offer: offer.changelog.offset)
    adopted(config)
    assert chain_of(config) == (newest.index.blob_id, 0)
    assert offers(config) == {}
    needed = referenced(stage_two(config))
    assert needed == blob_files(tmp_path, expiring=False)
    assert other.index.blob_id in blob_files(tmp_path) - needed
    later = FileBlobStore.time_ms
    monkeypatch.setattr(FileBlobStore, "time_ms", lambda self: later(self) + 10 * DAY_MS)
    collect(stage_two(config), tmp_path, "--write")
    assert blob_files(tmp_path) == needed
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_an_older_offer_is_adopted_if_the_newest_is_damaged(config: JobConfig, tmp_path: Path) -> None:
    """FAULT 13: the newest offer has lost a blob that only it has. The owner adopts the older one, and the changes
    since then become a segment."""
    materialize(config, tmp_path)
    ((_, older),) = offers(config).items()
    before = blob_files(tmp_path)
    commit(config, {b"between": b"1"}, 601)
    materialize(config, tmp_path, "--again")
    newest = max(offers(config).values(), key=lambda offer: offer.changelog.offset)
    lost = max(blob_files(tmp_path) - before - {newest.index.blob_id})
    (tmp_path / "blobs" / lost).unlink()
    adopted(config)
    assert chain_of(config) == (older.index.blob_id, 1)
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_an_owner_that_dies_before_the_ttl_is_removed(config: JobConfig, tmp_path: Path) -> None:
    """The next opening removes the TTL of every blob that the adopted checkpoint refers to."""
    materialize(config, tmp_path)
    commit(config, {b"x": b"1"}, 601)

    def die(phase: Phase, subject: str) -> None:
        if phase is Phase.REMOVE_TTL:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), observed(die):
        adopted(config)
    assert blob_files(tmp_path, expiring=True)
    adopted(config)
    assert not blob_files(tmp_path, expiring=True)
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_an_unanswered_adoption_is_settled(config: JobConfig, tmp_path: Path) -> None:
    """A failed adoption does not make the opening fail. The next opening adopts the offer, and the next commit
    continues from it."""
    materialize(config, tmp_path)
    with failing(Phase.SEND_CHECKPOINT), StateManager(stage_two(config)) as manager, manager.open_task(TASK) as task:
        assert task.last_checkpoint is not None
        assert task.last_checkpoint.marker(BLOBS, "totals") is None
    ((_, offer),) = offers(config).items()
    adopted(config)
    assert totals(config, BLOBS) == totals(config, CHANGELOG)
    check_next_commit(config)
    assert chain_of(config) == (offer.index.blob_id, 1)


def test_a_commit_after_a_failed_adoption(config: JobConfig, tmp_path: Path) -> None:
    """An owner that could not adopt the offer commits all the same, and the blobs have the complete state."""
    materialize(config, tmp_path)
    with StateManager(stage_two(config)) as manager:
        with failing(Phase.SEND_CHECKPOINT):
            task = manager.open_task(TASK)
        assert len(offers(config)) == 1
        write(task, {b"x": b"1", b"key-0200": None})
        task.commit({"orders-0": 601})
        task.close()
    assert totals(config, BLOBS) == totals(config, CHANGELOG)
    check_next_commit(config)


def check_next_commit(config: JobConfig) -> None:
    """Check that the job in stage 2 commits from here, and that both backends have exactly its state."""
    before = totals(config, CHANGELOG)[TASK]
    commit(stage_two(config), {b"next": b"1", b"key-0300": None}, 700)
    expected = {key: value for key, value in before.items() if key != b"key-0300"} | {b"next": b"1"}
    assert totals(config, BLOBS) == totals(config, CHANGELOG) == {TASK: expected}


@pytest.mark.long
@pytest.mark.parametrize("where", ["directory", "s3"])
def test_an_engine_adopts_for_all_tasks_at_once(kafka: KafkaServer, s3: S3Server, tmp_path: Path, where: str) -> None:
    """`acquire` adopts the offers of all tasks before the first attempt."""
    more = {"blob__store__s3__path__style": True} if where == "s3" else {}
    config = stage_one(kafka, tmp_path, s3=s3 if where == "s3" else None, tasks=3, stores=("totals", "seen"), **more)
    tasks = ["Partition 0", "Partition 1", "Partition 2"]

    def batch(config: JobConfig, number: int) -> None:
        with StateManager(config) as manager:
            epoch = manager.acquire()
            items = {**ROWS, b"n": b"%d" % number, b"k%d" % number: b"v", b"k%d" % (number - 1): None}
            manager.publish([attempt(config, epoch, task, items, number) for task in tasks])

    batch(config, 1)
    reports = materialize(config, tmp_path, "--task", "0", "--task", "2")
    assert [report["result"] for report in reports] == ["offered"] * 4
    batch(config, 2)
    dual = stage_two(config)
    with StateManager(dual) as manager:
        epoch = manager.acquire()
        markers = {task: (epoch.checkpoints[task] and epoch.checkpoints[task].marker(BLOBS, "seen")) for task in tasks}  # type: ignore[union-attr]
        assert [marker is not None for marker in markers.values()] == [True, False, True]
        assert offers(config) == {}
        manager.publish([attempt(dual, epoch, task, {b"n": b"3"}, 3) for task in tasks])
    assert totals(dual, BLOBS) == totals(dual, CHANGELOG)


def test_a_build_that_takes_too_long_is_refused(
    config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction may have removed deletes before the replay reached them. The build fails; the next starts from
    scratch."""
    with monkeypatch.context() as patch:
        patch.setattr("statemgr.operations.materialize.build.deletes_kept_ms", lambda settings: 0)
        with pytest.raises(MissingState, match="removed deletes"):
            materialize_task(config, TASK)
    assert offers(config) == {}
    (done,) = materialize_task(config, TASK)
    assert done.records == 600


def test_a_checkpoint_that_compaction_may_have_changed_is_refused(
    config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job published a newer checkpoint while the build read the last part, and compaction may have removed records
    of the older one."""

    def commit_too(phase: Phase, subject: str) -> None:
        if phase is Phase.REPLAY:
            commit(config, {b"key-0400": b"newer"}, 601)

    monkeypatch.setattr(build, "certain_ms", lambda waited_ms: waited_ms if waited_ms == DAY_MS else 0)
    with observed(commit_too), pytest.raises(MissingState, match=r"min\.compaction\.lag\.ms"):
        materialize_task(config, TASK)
    assert offers(config) == {}


def test_a_changelog_without_its_beginning_is_refused(config: JobConfig, tmp_path: Path) -> None:
    """FAULT 21: records were deleted, but not by compaction. The command never offers a part of the state."""
    topic = config.stores["totals"].changelog_topic
    delete_records(config, topic, 100)
    result = run(config, tmp_path, "--parallel", "1")
    assert result.exit_code == 4
    assert topic in result.output
    assert offers(config) == {}


def test_damaged_notes_begin_a_build_again(config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes are a cache, so a build with damaged notes starts again. It refuses a link in place of the directory and
    never follows it (FAULT 49)."""
    place = config.state_dir / config.job_name / config.job_id / "materialize" / "Partition_0" / "totals"
    monkeypatch.setattr(build, "NOTE_S", 0.0)
    with failing(Phase.UPLOAD), pytest.raises(UnavailableError):
        materialize_task(config, TASK)
    note = place / "replayed.json"
    note.write_bytes(note.read_bytes()[:-1])
    (done,) = materialize_task(config, TASK)
    assert done.records == 600
    outside = tmp_path / "outside"
    outside.mkdir()
    (place / "store").symlink_to(outside)
    with pytest.raises(InvalidError, match="something else"):
        materialize_task(config, TASK, again=True)
    assert not list(outside.iterdir())


def test_a_killed_replay_does_not_continue_after_a_fill(config: JobConfig, tmp_path: Path) -> None:
    """The fill does not delete a key that the changelog had lost: the delete of the key may be lost as well."""
    with failing(Phase.UPLOAD), pytest.raises(UnavailableError):
        materialize_task(config, TASK)
    note = config.state_dir / config.job_name / config.job_id / "materialize" / "Partition_0" / "totals/replayed.json"
    durable.write_note(note, {**durable.read_note(note, 1024 * 1024), "built": None})
    commit(config, {b"key-0400": None}, 601)
    delete_records(config, config.stores["totals"].changelog_topic, -1)
    commit(config, {b"x": b"1"}, 602)  # fills the changelog from the local copy
    materialize_task(config, TASK)
    commit(stage_two(config), {b"y": b"1"}, 603)
    assert totals(config, BLOBS) == totals(config, CHANGELOG)
    assert b"key-0400" not in totals(config, BLOBS)


def test_two_runs_at_once(config: JobConfig, tmp_path: Path) -> None:
    """On one machine the second run fails with an error. On two machines both make an offer, and the owner adopts
    one."""
    refused: list[UnavailableError] = []

    def again(phase: Phase, subject: str) -> None:
        if phase is Phase.UPLOAD and not refused:
            refused.append(UnavailableError("not yet"))
            with pytest.raises(UnavailableError, match="another process") as found:
                materialize_task(config, TASK)
            refused.append(found.value)
            materialize_task(with_changes(config, state__dir=str(tmp_path / "other")), TASK)

    with observed(again):
        (done,) = materialize_task(config, TASK)
    assert done.offered
    assert len(refused) == 2
    assert len(offers(config)) == 2
    adopted(config)
    assert totals(config, BLOBS) == totals(config, CHANGELOG)
    assert blob_files(tmp_path, expiring=False) == referenced(stage_two(config))


def test_garbage_collection_keeps_live_offers(
    config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 38: the blobs of a live offer stay, however old they are. Those of an offer that expired long ago are
    deleted together with it."""
    materialize(config, tmp_path)
    offered = blob_files(tmp_path)
    ((key, offer),) = offers(config).items()
    with monkeypatch.context() as patch:
        later = FileBlobStore.time_ms
        patch.setattr(FileBlobStore, "time_ms", lambda self: later(self) + 10 * DAY_MS)
        assert collect(config, tmp_path, "--write")["kept"]["blobs"] == len(offered)
        write_offer(
            config, key, replace(offer, expires_ms=offer.as_of_ms - DAY_MS // 2)
        )  # expired for less than a grace period
        assert collect(config, tmp_path, "--write")["kept"]["blobs"] == len(offered)
        assert blob_files(tmp_path) == offered
        write_offer(config, key, replace(offer, expires_ms=offer.as_of_ms - 2 * DAY_MS))
        dry = collect(config, tmp_path)
        assert (dry["orphans"]["blobs"], dry["expired_offers"], len(offers(config))) == (len(offered), 1, 1)
        assert collect(config, tmp_path, "--write")["deleted"]["blobs"] == len(offered)
    assert blob_files(tmp_path) == set()
    assert offers(config) == {}
    assert totals(config, CHANGELOG)[TASK] == {key: value for key, value in ROWS.items() if key not in SOME}


def test_a_collection_next_to_a_materialization_leaves_it_alone(config: JobConfig, tmp_path: Path) -> None:
    """FAULT 38: blobs that are uploaded but not offered yet are young, and garbage collection keeps them."""
    reports = []

    def collect_too(phase: Phase, subject: str) -> None:
        if phase in (Phase.PUT_INDEX, Phase.OFFER):
            reports.append(collect(config, tmp_path, "--write"))

    with observed(collect_too):
        (done,) = materialize_task(config, TASK)
    assert done.offered
    assert [report["deleted"]["blobs"] for report in reports] == [0, 0]
    assert reports[1]["young"]["blobs"] > 1
    adopted(config)
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_an_offer_that_the_brokers_cannot_date_is_kept(
    config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the brokers' time, garbage collection cannot tell whether an owner is about to adopt the offer."""
    materialize(config, tmp_path)
    ((key, offer),) = offers(config).items()
    write_offer(config, key, replace(offer, expires_ms=0))

    def refuse(self: ChangelogTopics) -> int:
        raise AccessDenied("no temporary topics for you")

    monkeypatch.setattr(ChangelogTopics, "time_ms", refuse)
    later = FileBlobStore.time_ms
    monkeypatch.setattr(FileBlobStore, "time_ms", lambda self: later(self) + 10 * DAY_MS)
    assert collect(config, tmp_path, "--write")["deleted"]["blobs"] == 0
    commit(stage_two(config), {b"x": b"1"}, 601)  # and the owner uploads everything instead
    assert chain_of(config)[0] != offer.index.blob_id


def test_a_store_in_memory(kafka: KafkaServer, tmp_path: Path) -> None:
    """`materialize` also works for a store of type `memory`."""
    config = with_changes(stage_one(kafka, tmp_path), stores__totals__type="memory")
    commit(config, ROWS, 500)
    materialize(config, tmp_path)
    commit(config, {b"key-0000": None}, 501)
    adopted(config)
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_what_needs_no_offer(config: JobConfig, tmp_path: Path) -> None:
    """A dry run builds nothing. A store with a snapshot needs no offer, nor does a job with a snapshot in every
    commit."""
    (report,) = materialize(config, tmp_path, "--dry-run")
    assert (report["result"], offers(config)) == ("to do", {})
    assert not blob_files(tmp_path)
    commit(stage_two(config), {b"x": b"1"}, 601)
    for options in ((), ("--again", "--dry-run")):
        (report,) = materialize(config, tmp_path, *options)
        assert (report["result"], report["reason"]) == ("not needed", "its checkpoint has a snapshot")
    result = run(with_changes(config, task__commit__snapshot__interval=["1 commit"]), tmp_path)
    assert result.exit_code == 2
    assert "1 commit" in result.output
    assert run(config, tmp_path, "--task", "7").exit_code == 4
    assert run(config, tmp_path, "--store", "total").exit_code == 2


def test_a_waiting_offer_is_shown(config: JobConfig, tmp_path: Path) -> None:
    """`migrate status` and `migrate plan` show an offer until its adoption, and the plan counts no upload for its
    store."""

    def migrate(command: str, *more: str) -> Result:
        path = str(write_file(config, tmp_path))
        return CliRunner().invoke(cli, ["migrate", command, "--config", path, *more], catch_exceptions=False)

    assert json.loads(migrate("status", "--json").stdout)[0]["offer"] is None
    before = json.loads(migrate("plan", "--json").stdout)
    assert (before["bytes"] > 0, before["offered"]) == (True, 0)
    assert "`statemgr materialize`" in migrate("plan").stdout

    done = run(config, tmp_path)
    assert done.exit_code == 0, done.output
    assert "restart the job with blob-store among its backup factories" in done.output
    ((_, offer),) = offers(config).items()
    (status,) = json.loads(migrate("status", "--json").stdout)
    assert status["offer"] == {"checkpoint_id": str(offer.checkpoint_id), "expires_ms": offer.expires_ms}
    assert "an offer for blob-store waits" in " ".join(migrate("status").stdout.split())
    after = json.loads(migrate("plan", "--json").stdout)
    assert (after["bytes"], after["offered"]) == (0, 1)
    plan = migrate("plan").stdout
    assert "stores that begin with an offered snapshot: 1" in plan
    assert "`statemgr materialize`" not in plan

    adopted(config)
    (status,) = json.loads(migrate("status", "--json").stdout)
    assert (status["offer"], status["stage"]) == (None, 2)
    assert "an offer" not in migrate("status").stdout


@pytest.mark.parametrize("what", ["another store", "deleted"])
def test_files_that_the_store_lacks_are_uploaded_again(config: JobConfig, tmp_path: Path, what: str) -> None:
    """FAULT 13: the notes of a killed run name blobs that are in another store, or have been deleted since. The next
    run makes a complete offer, and the owner adopts it."""

    def die(phase: Phase, subject: str) -> None:
        if phase is Phase.PUT_INDEX:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), observed(die):
        materialize_task(config, TASK)
    stored = blob_files(tmp_path)
    assert stored
    if what == "another store":
        (tmp_path / "other-blobs" / "lost+found").mkdir(parents=True)  # a disk that is mounted
        config = with_changes(config, blob__store__uri=(tmp_path / "other-blobs").as_uri())
    else:
        for name in stored:
            (tmp_path / "blobs" / name).unlink()
    (done,) = materialize_task(config, TASK)
    assert done.offered
    assert done.uploaded >= done.size
    adopted(config)
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_an_offer_that_nobody_can_adopt_does_not_stand_in_the_way(config: JobConfig, tmp_path: Path) -> None:
    """FAULT 13: the offer has lost a blob. `migrate status` ignores it, and another run makes a new one."""
    materialize(config, tmp_path)
    ((_, offer),) = offers(config).items()
    lost = max(blob_files(tmp_path) - {offer.index.blob_id})
    (tmp_path / "blobs" / lost).unlink()
    shown = CliRunner().invoke(cli, ["migrate", "status", "--config", str(write_file(config, tmp_path)), "--json"])
    assert [one["offer"] for one in json.loads(shown.stdout)] == [None]
    (report,) = materialize(config, tmp_path)
    assert report["result"] == "offered"
    adopted(config)
    assert chain_of(config)[0] != offer.index.blob_id
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_an_offer_of_a_recreated_changelog_does_not_stand_in_the_way(config: JobConfig, tmp_path: Path) -> None:
    """FAULT 21: the offer's changelog was deleted and created again. Another run makes a new offer."""
    materialize(config, tmp_path)
    ((_, offer),) = offers(config).items()
    recreate(config, offer.changelog.topic)
    commit(config, {b"x": b"1"}, 601)  # fills the new topic from the local copy
    (report,) = materialize(config, tmp_path)
    assert report["result"] == "offered"
    adopted(config)
    assert totals(config, BLOBS) == totals(config, CHANGELOG)
