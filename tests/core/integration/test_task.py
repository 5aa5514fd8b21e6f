"""Tasks of a consumer loop on a real broker: commit, restart, move, and switch backends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from statemgr import JobConfig, StateManager
from statemgr.backends.changelog.backup import ChangelogBackup
from statemgr.blobs.file import FileBlobStore
from statemgr.errors import (
    FencedError,
    LayoutMismatch,
    MissingError,
    MissingState,
    PermissionNeeded,
    RetryableError,
    StatemgrError,
    TopicMisconfigured,
    UnavailableError,
)
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.local.machine import this_process
from statemgr.phases import Phase, observed
from tests.commits import current, failing, published
from tests.jobs import DUAL, contents, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import make_topics, plain_producer, recreate
from tests.servers import KafkaServer, S3Server

BACKENDS = ["kafka-changelog", "blob-store"]


def config_of(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    """Create a dual-commit job on a directory."""
    return JobConfig.from_mapping(job_mapping(kafka, directory, **more))  # type: ignore[arg-type]


def put_and_commit(config: JobConfig, items: dict[bytes, bytes | None], offset: int, **permissions: bool) -> str:
    """Open, write to every store, commit and close. Returns how the first store was restored."""
    with StateManager(config) as manager, manager.open_task("Partition 0", **permissions) as task:
        for store in config.stores:
            for key, value in items.items():
                if value is None:
                    task.store(store).delete(key)
                else:
                    task.store(store).put(key, value)
        task.commit({"orders-0": offset})
        return task.restored[0].factory


def test_a_new_job_starts_empty_and_its_commit_comes_back(kafka: KafkaServer, tmp_path: Path) -> None:
    """A2, A4, A40: a job without a checkpoint starts empty. Its commit is restored with its input offsets."""
    config = config_of(kafka, tmp_path)
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        assert task.last_checkpoint is None
        assert [r.factory for r in task.restored] == ["empty"]
        task.store("totals").put(b"85123A", b"6")
        checkpoint = task.commit({"orders-0": 1234})
        assert task.last_checkpoint == checkpoint
        assert checkpoint.input_offsets == {"orders-0": 1234}
        assert set(checkpoint.state_checkpoint_markers) == set(DUAL)
    state, offsets = contents(config)
    assert state == {"totals": {b"85123A": b"6"}}
    assert offsets == {"orders-0": 1234}


@pytest.mark.parametrize("restore", BACKENDS)
def test_another_machine_restores_exactly_the_commit(kafka: KafkaServer, tmp_path: Path, restore: str) -> None:
    """Invariant 11, A40 (new host): another machine restores exactly what was committed, from either backend."""
    config = config_of(kafka, tmp_path)
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        store = task.store("totals")
        store.put_many({b"a": b"1", b"b": b"2", b"": b"empty key", b"empty": b""})
        task.commit({"orders-0": 1})
        store.delete(b"a")
        store.put(b"big", b"x" * 300_000)
        task.commit({"orders-0": 2})
        store.put(b"uncommitted", b"1")
    with StateManager(elsewhere(config, tmp_path / "other", restore)) as manager:
        task = manager.open_task("Partition 0")
        assert dict(task.store("totals").range()) == {
            b"": b"empty key",
            b"b": b"2",
            b"empty": b"",
            b"big": b"x" * 300_000,
        }
        assert task.last_checkpoint is not None
        assert task.last_checkpoint.input_offsets == {"orders-0": 2}
        assert task.restored[0].factory == restore


def test_a_restart_on_the_same_machine_fetches_nothing(kafka: KafkaServer, tmp_path: Path) -> None:
    """A22, A40 (host affinity), invariant 10: the restart uses the local directory of exactly this state."""
    config = config_of(kafka, tmp_path)
    put_and_commit(config, {b"k": b"v"}, 1)
    assert put_and_commit(config, {b"k2": b"v"}, 2) == "local"
    with StateManager(config) as manager:
        restored = manager.open_task("Partition 0").restored[0]
    assert restored.factory == "local"
    assert restored.bytes_fetched == 0


def test_a_local_directory_of_another_state_is_not_used(kafka: KafkaServer, tmp_path: Path) -> None:
    """Invariant 10, A22: a machine that was left behind restores the newer state, and reuses files by identity."""
    config = config_of(kafka, tmp_path)
    put_and_commit(config, {b"%d" % n: random.Random(n).randbytes(1000) for n in range(500)}, 1)
    other = elsewhere(config, tmp_path / "other", "blob-store")
    put_and_commit(other, {b"new": b"1"}, 2)
    back = with_changes(config, task__restore__factories=["blob-store"])
    with StateManager(back) as manager:
        task = manager.open_task("Partition 0")
        assert task.restored[0].factory == "blob-store"
        assert task.restored[0].bytes_reused > 0
        assert task.store("totals").get(b"new") == b"1"
        assert task.store("totals").get(b"499") == random.Random(499).randbytes(1000)


def test_several_stores_and_prefix_and_range(kafka: KafkaServer, tmp_path: Path) -> None:
    """A24: several stores come back; ranges are in key order with an exclusive end."""
    config = config_of(
        kafka,
        tmp_path,
        stores=("totals", "index"),
        stores__index__key__serde="string",
        stores__index__value__serde="json",
    )
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        totals, index = task.store("totals"), task.store("index")
        totals.put_many([(b"85123A", b"6"), (b"85", b"1"), (b"86", b"2"), (b"84", b"0")])
        index.put("ä", {"n": [1, 2]})
        assert list(totals.prefix(b"85")) == [(b"85", b"1"), (b"85123A", b"6")]
        assert [key for key, _ in totals.range(b"85", b"86")] == [b"85", b"85123A"]
        assert totals.get_many([b"86", b"none"]) == [b"2", None]
        task.commit({"orders-0": 1})
    with StateManager(elsewhere(config, tmp_path / "x", "blob-store")) as manager:
        assert manager.open_task("Partition 0").store("index").get("ä") == {"n": [1, 2]}


def test_an_unchanged_store_keeps_its_markers(kafka: KafkaServer, tmp_path: Path) -> None:
    """A commit without changes moves only the input offsets."""
    config = config_of(kafka, tmp_path)
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        task.store("totals").put(b"a", b"1")
        first = task.commit({"orders-0": 1})
        second = task.commit({"orders-0": 2})
        assert second.state_checkpoint_markers == first.state_checkpoint_markers
        assert second.stores == first.stores
        assert second.sequence == first.sequence + 1


def test_the_older_of_two_owners_is_fenced(kafka: KafkaServer, tmp_path: Path) -> None:
    """Invariant 7, FAULT 23: the zombie's commit fails and takes nothing from the new owner."""
    config = config_of(kafka, tmp_path)
    with StateManager(config) as old, StateManager(elsewhere(config, tmp_path / "new", "blob-store")) as new:
        zombie = old.open_task("Partition 0")
        zombie.store("totals").put(b"a", b"1")
        zombie.commit({"orders-0": 1})
        owner = new.open_task("Partition 0")
        owner.store("totals").put(b"b", b"2")
        owner.commit({"orders-0": 2})
        zombie.store("totals").put(b"zombie", b"1")
        for _ in range(2):
            with pytest.raises(FencedError, match=rf"another owner \({this_process()}, \d+ s ago\) has published"):
                zombie.commit({"orders-0": 99})
        owner.store("totals").put(b"c", b"3")
        owner.commit({"orders-0": 3})
    for backend in BACKENDS:
        state, offsets = contents(elsewhere(config, tmp_path / backend, backend))
        assert state["totals"] == {b"a": b"1", b"b": b"2", b"c": b"3"}
        assert offsets == {"orders-0": 3}


def test_restore_is_switched_back_and_forth(kafka: KafkaServer, tmp_path: Path) -> None:
    """A47: the job restores from blobs and from the changelog in turn, and the state never differs."""
    config = config_of(kafka, tmp_path)
    model: dict[bytes, bytes] = {}
    for turn in range(4):
        moved = elsewhere(config, tmp_path / str(turn), BACKENDS[turn % 2])
        changes: dict[bytes, bytes | None] = {
            b"k%d" % turn: b"v%d" % turn,
            b"k%d" % (turn - 2): None,
            b"same": b"%d" % turn,
        }
        put_and_commit(moved, changes, turn)
        for key, value in changes.items():
            model.pop(key, None) if value is None else model.update({key: value})
        assert contents(elsewhere(config, tmp_path / f"{turn}-check", BACKENDS[(turn + 1) % 2]))[0]["totals"] == model


def test_a_backend_switched_on_is_filled_tombstones_included(kafka: KafkaServer, tmp_path: Path) -> None:
    """Protocol 5, FAULT 35, A31: a changelog that was off and is on again holds exactly the state, deletes included."""
    config = config_of(kafka, tmp_path)
    put_and_commit(config, {b"kept": b"1", b"gone": b"1"}, 1)
    blobs_only = with_changes(config, task__backup__factories=["blob-store"], task__restore__factories=["blob-store"])
    put_and_commit(blobs_only, {b"gone": None, b"new": b"2"}, 2)
    put_and_commit(config, {}, 3)
    state, _ = contents(elsewhere(config, tmp_path / "x", "kafka-changelog"))
    assert state["totals"] == {b"kept": b"1", b"new": b"2"}


def test_blobs_switched_on_for_one_store(kafka: KafkaServer, tmp_path: Path) -> None:
    """A46, A23: one store uses dual commit, and the other one restores from its changelog."""
    config = config_of(kafka, tmp_path, stores=("totals", "index"), backup=("kafka-changelog",))
    put_and_commit(config, {b"a": b"1"}, 1)
    dual = with_changes(
        config,
        stores__totals__backup__factories=DUAL,
        stores__totals__restore__factories=["blob-store", "kafka-changelog"],
    )
    put_and_commit(dual, {b"b": b"2"}, 2)
    with StateManager(with_changes(dual, state__dir=str(tmp_path / "x"))) as manager:
        task = manager.open_task("Partition 0")
        assert {r.store: r.factory for r in task.restored} == {
            "totals": "blob-store",
            "index": "kafka-changelog",
        }
        assert dict(task.store("index").range()) == dict(task.store("totals").range()) == {b"a": b"1", b"b": b"2"}


def test_a_blob_restore_that_fails_falls_back_if_the_list_says_so(kafka: KafkaServer, tmp_path: Path) -> None:
    """A49, FAULT 13, invariant 8: a missing blob leads to a typed error or the next factory, and never to empty
    state."""
    config = config_of(kafka, tmp_path)
    noise = random.Random(1).randbytes(100_000)
    put_and_commit(config, {b"a": noise}, 1)
    for blob in (tmp_path / "blobs").rglob("*.sst*"):
        blob.unlink()
    with (
        StateManager(elsewhere(config, tmp_path / "x", "blob-store")) as manager,
        pytest.raises(MissingError),
    ):
        manager.open_task("Partition 0")
    with StateManager(elsewhere(config, tmp_path / "y", ["blob-store", "kafka-changelog"])) as manager:
        task = manager.open_task("Partition 0")
        assert task.restored[0].factory == "kafka-changelog"
        assert "blob-store" in task.restored[0].reasons
        assert task.store("totals").get(b"a") == noise


def test_an_opening_that_fails_for_now_may_be_repeated(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 8 and 13: no factory could supply the store, but one was only unavailable. The caller may try again."""
    config = config_of(kafka, tmp_path, blob__store__retry__policy__max__retries=1)
    noise = random.Random(1).randbytes(100_000)
    put_and_commit(config, {b"a": noise}, 1)

    def away(*_: object, **__: object) -> NoReturn:
        raise UnavailableError("away")

    moved = elsewhere(config, tmp_path / "x", ["blob-store", "kafka-changelog"])
    with StateManager(moved) as manager:
        for blobs_are in ("away", "missing"):
            with monkeypatch.context() as broken:
                broken.setattr(ChangelogTopics, "changes", away)
                if blobs_are == "away":
                    broken.setattr(FileBlobStore, "get", away)
                else:
                    for blob in (tmp_path / "blobs").rglob("*.sst*"):
                        blob.unlink()
                with pytest.raises(RetryableError, match=r"no restore factory.*blob-store.*kafka-changelog"):
                    manager.open_task("Partition 0")
        assert manager.open_task("Partition 0").store("totals").get(b"a") == noise


def test_a_store_without_a_marker_is_an_error(kafka: KafkaServer, tmp_path: Path) -> None:
    """A15, A31: a restore from blobs fails where the checkpoint has only changelog markers."""
    config = config_of(kafka, tmp_path, backup=("kafka-changelog",))
    put_and_commit(config, {b"a": b"1"}, 1)
    moved = elsewhere(config, tmp_path / "x", "blob-store")
    with StateManager(moved) as manager, pytest.raises(MissingState, match=r"no marker.*kafka-changelog"):
        manager.open_task("Partition 0")
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").rglob("*.sst"))


def test_stores_come_and_go_only_with_permission(kafka: KafkaServer, tmp_path: Path) -> None:
    """Protocol 6, FAULT 31, A3, A12: a mistyped name is refused. The next publish is followed by the deletion of a
    removed store's blobs."""
    config = config_of(kafka, tmp_path, stores=("totals", "old"), task__checkpoint__retained=1)
    put_and_commit(config, {b"a": b"1"}, 1)
    mapping = {k: v for k, v in config.to_mapping().items() if not k.startswith("stores.old")}
    without = JobConfig.from_mapping(mapping)
    mistyped = JobConfig.from_mapping({**mapping, "stores.totalls.value.serde": "bytes"})
    for wrong in (without, mistyped):
        with StateManager(wrong) as manager, pytest.raises(PermissionNeeded):
            manager.open_task("Partition 0")
    old = list((tmp_path / "blobs").rglob("*/old/*"))
    assert old
    with StateManager(without) as manager:
        with failing(Phase.SEND_CHECKPOINT), pytest.raises(RetryableError):
            manager.open_task("Partition 0", allow_removed_stores=True)
        assert [p for p in old if p.exists()] == old, "nothing is collected before the publish"
        with manager.open_task("Partition 0", allow_removed_stores=True) as task:
            task.store("totals").put(b"b", b"2")
            task.commit({"orders-0": 2})
    assert not [p for p in (tmp_path / "blobs").rglob("*") if p.is_file() and "old" in p.parts]
    with StateManager(mistyped) as manager, manager.open_task("Partition 0", allow_new_stores=True) as task:
        assert dict(task.store("totalls").range()) == {}
        assert task.store("totals").get(b"b") == b"2"


@pytest.mark.parametrize(
    ("backup", "tasks", "partitioner", "error"),
    [
        (DUAL, 1, "spark-hash", LayoutMismatch),
        (("blob-store",), 2, "kafka-partition", LayoutMismatch),
        (DUAL, 2, "kafka-partition", TopicMisconfigured),  # a changelog has a partition for each task
    ],
    ids=["partitioner", "tasks", "partitions"],
)
def test_another_number_of_tasks_or_partitioner_is_refused(
    kafka: KafkaServer,
    tmp_path: Path,
    backup: Sequence[str],
    tasks: int,
    partitioner: str,
    error: type[StatemgrError],
) -> None:
    """Invariant 14: the layout is part of every checkpoint. A job of another partitioner or number of tasks is refused,
    and the checkpoint stays."""
    config = config_of(kafka, tmp_path, backup=backup)
    put_and_commit(config, {b"a": b"1"}, 1)
    before = current(config)
    other = with_changes(config, job__tasks=tasks)
    with StateManager(other, partitioner=partitioner) as manager, pytest.raises(error):
        manager.open_task("Partition 0")
    assert before is not None
    assert current(config) == before


def test_output_is_in_the_same_transaction(kafka: KafkaServer, tmp_path: Path) -> None:
    """Protocol 1: output appears with the commit, once, and not before."""
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient, NewTopic

    topic = kafka.fresh_name("out")
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(10)
    config = config_of(kafka, tmp_path)
    consumer = Consumer(
        {"bootstrap.servers": kafka.bootstrap_servers, "group.id": topic, "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        task.produce(topic, b"k", b"v", headers=[("h", b"1")])
        assert consumer.poll(3.0) is None
        task.commit({"orders-0": 1})
        message = consumer.poll(15.0)
        assert message is not None
        assert (message.key(), message.value(), message.headers()) == (b"k", b"v", [("h", b"1")])
        task.commit({"orders-0": 2})
        assert consumer.poll(1.0) is None
    consumer.close()


def test_on_s3_a_commit_comes_back(kafka: KafkaServer, s3: S3Server, tmp_path: Path) -> None:
    """On a real S3 protocol, a job makes incremental commits, and another machine restores from blobs alone."""
    config = config_of(kafka, tmp_path, s3=s3, backup=("blob-store",))
    put_and_commit(config, {b"%03d" % n: b"x" * 2000 for n in range(300)}, 1)
    put_and_commit(config, {b"one": b"more"}, 2)
    state, offsets = contents(elsewhere(config, tmp_path / "x", "blob-store"))
    assert len(state["totals"]) == 301
    assert offsets == {"orders-0": 2}


def test_a_large_restore_is_opened_for_writing_with_its_first_write(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening for writing waits for the disk, which a large restore keeps busy. The store opens with its first
    write."""
    config = config_of(kafka, tmp_path, backup=["blob-store"])
    state = {b"%03d" % n: b"1" for n in range(500)}
    put_and_commit(config, dict(state), 1)
    monkeypatch.setattr("statemgr.flows.opening.restore._MUCH", 1)
    there = elsewhere(config, tmp_path / "there", "blob-store")
    with StateManager(there) as manager, manager.open_task("Partition 0") as task:
        store = task.store("totals")
        assert dict(store.range()) == state
        assert not list((tmp_path / "there").rglob("LOCK"))
        task.commit({"orders-0": 2})
        assert not list((tmp_path / "there").rglob("LOCK"))
        store.put(b"000", b"2")
        task.commit({"orders-0": 3})
        assert list((tmp_path / "there").rglob("LOCK"))
    assert contents(elsewhere(config, tmp_path / "again", "blob-store"))[0]["totals"] == state | {b"000": b"2"}


def test_a_task_that_comes_back_replays_only_what_it_missed(kafka: KafkaServer, tmp_path: Path) -> None:
    """A machine that had the task before continues its local directory with the newer part of the changelog."""
    here = config_of(kafka, tmp_path, backup=["kafka-changelog"])
    put_and_commit(here, {b"k%03d" % n: b"1" for n in range(500)}, 1)
    put_and_commit(elsewhere(here, tmp_path / "other", "kafka-changelog"), {b"k001": None, b"k002": b"2"}, 2)
    with StateManager(here) as manager, manager.open_task("Partition 0") as task:
        assert dict(task.store("totals").range()) == {
            b"k%03d" % n: b"2" if n == 2 else b"1" for n in range(500) if n != 1
        }
        (restored,) = task.restored
        assert (restored.factory, restored.records) == ("kafka-changelog", 2)
        assert restored.bytes_reused > 0


@pytest.mark.parametrize(("interval_s", "copies"), [(3600.0, 0), (-1.0, 3)])
def test_quick_commits_to_a_changelog_wait_for_no_local_copy(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval_s: float, copies: int
) -> None:
    """The task makes a local copy only now and then. The owner after a dead one replays what came after the copy."""
    monkeypatch.setattr(ChangelogBackup, "local_copy_interval_s", interval_s)
    config = config_of(kafka, tmp_path, backup=["kafka-changelog"], task__checkpoint__retained=3)
    made: list[str] = []
    with StateManager(config) as first, observed(lambda phase, _: made.append(phase)):
        dies = first.open_task("Partition 0")
        for number in range(3):
            dies.store("totals").put(b"k%d" % number, b"v")
            dies.store("totals").delete(b"k%d" % (number - 1))
            dies.commit({"orders-0": number})
        assert made.count(Phase.CHECKPOINT_DIR) == copies
        with StateManager(config) as second, second.open_task("Partition 0") as task:
            assert dict(task.store("totals").range()) == {b"k2": b"v"}
            (restored,) = task.restored
            assert (restored.factory, restored.records) == (("local", 0) if copies == 3 else ("kafka-changelog", 6))
            assert (restored.bytes_reused > 0) == (copies == 3)


def test_the_first_changes_of_a_store_fill_a_changelog_by_themselves(kafka: KafkaServer, tmp_path: Path) -> None:
    """The changes of an empty store, up to its first successful commit, are its complete state. No directory is needed
    to fill a changelog with them."""
    config = config_of(kafka, tmp_path, backup=["kafka-changelog"])
    make_topics(config)
    producer = plain_producer(config)
    for key in (b"stale", b"a"):
        producer.produce(config.stores["totals"].changelog_topic, b"of before", key, partition=0)
    assert producer.flush(10) == 0
    made: list[str] = []
    with StateManager(config) as manager, observed(lambda phase, _: made.append(phase)):
        task = manager.open_task("Partition 0", allow_empty_start=True, overwrite_changelog=True)
        task.store("totals").put_many({b"a": b"1", b"b": b"1", b"c": b"1"})
        with failing(Phase.SEND_CHECKPOINT), pytest.raises(RetryableError):
            task.commit({"orders-0": 1})
        task.store("totals").put_many({b"b": b"2", b"d": b"2"})
        task.store("totals").delete(b"c")
        task.commit({"orders-0": 2})
        assert Phase.CHECKPOINT_DIR not in made
        state = {b"a": b"1", b"b": b"2", b"d": b"2"}
        assert published(config, "kafka-changelog")["Partition 0"]["totals"] == state
        # from here on, the changes are no longer the complete state
        task.store("totals").put(b"e", b"3")
        task.commit({"orders-0": 3})
        recreate(config, config.stores["totals"].changelog_topic)
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        assert dict(task.store("totals").range()) == state | {b"e": b"3"}
        task.commit({"orders-0": 4})
    assert published(config, "kafka-changelog")["Partition 0"]["totals"] == state | {b"e": b"3"}
