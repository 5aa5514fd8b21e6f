"""Changelogs with records that no checkpoint explains: a fill needs permission to replace them (FAULT 48)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from statemgr import JobConfig, StateManager
from statemgr.errors import InvalidError, PermissionNeeded, RetryableError, UnavailableError
from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs
from statemgr.kafka.transactions.producer import KafkaTransaction
from statemgr.local.machine import SystemClock
from statemgr.phases import Phase, observed
from tests.commits import TASK, commit, failing, totals
from tests.jobs import DUAL, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import committed, recreate, send, state_of
from tests.servers import KafkaServer

CHANGELOG = "kafka-changelog"
FOREIGN = {f"key-{n}".encode(): b"theirs" for n in range(1000)}


def job(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    """A job with one task."""
    return JobConfig.from_mapping(job_mapping(kafka, directory, **more))  # type: ignore[arg-type]


def topic_of(config: JobConfig) -> str:
    """The store's changelog."""
    return config.stores["totals"].changelog_topic


def write_as_others(config: JobConfig, items: dict[bytes, bytes] = FOREIGN) -> None:
    """Write to the job's changelog as somebody who is not part of the job. Creates the changelog if it is missing."""
    with TopicAdmin(config, SystemClock()) as admin:
        admin.create_missing(changelog_topic_specs(with_changes(config, task__backup__factories=[CHANGELOG])))
    send(config, topic_of(config), items.items())


def refused(config: JobConfig, count: str, **permissions: bool) -> PermissionNeeded:
    """Check that a task and the whole job are refused with the number of records, and that the changelog stays as it
    was."""
    before = committed(config, topic_of(config))
    with StateManager(config) as manager:
        with pytest.raises(PermissionNeeded, match=f" {count} ") as caught:
            manager.open_task(TASK, **permissions)
        with pytest.raises(PermissionNeeded, match=f" {count} "):
            manager.acquire(**permissions)
    assert caught.value.where["topic"] == topic_of(config)
    assert caught.value.hint
    assert "overwrite_changelog=True" in caught.value.hint
    assert committed(config, topic_of(config)) == before
    return caught.value


@pytest.mark.parametrize("backup", [(CHANGELOG,), DUAL], ids=["changelog", "dual"])
def test_an_existing_changelog_is_not_filled_over_at_the_first_start(
    kafka: KafkaServer, tmp_path: Path, backup: tuple[str, ...]
) -> None:
    """FAULT 48, protocol 5, invariant 16: an empty start needs one permission, and deleting the records of others needs
    another."""
    config = job(kafka, tmp_path, backup=backup)
    write_as_others(config)
    first = refused(config, "1,000")
    assert first.hint
    assert "allow_empty_start=True" in first.hint  # the hint names both at once
    refused(config, "1,000", allow_empty_start=True)
    commit(config, {b"key-1": b"ours"}, 1, allow_empty_start=True, overwrite_changelog=True)
    assert state_of(committed(config, topic_of(config))) == {b"key-1": b"ours"}
    assert totals(config, CHANGELOG)[TASK] == {b"key-1": b"ours"}
    commit(config, {b"key-2": b"ours"}, 2)  # from now on it is the job's own


def test_a_changelog_that_another_job_is_writing(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 48: a mistyped topic name does not delete the keys of the running job that owns the topic."""
    theirs = job(kafka, tmp_path / "theirs")
    ours = job(kafka, tmp_path / "ours", backup=["blob-store"])
    commit(ours, {b"a": b"1"}, 1)
    mistyped = with_changes(ours, task__backup__factories=list(DUAL), stores__totals__changelog__topic=topic_of(theirs))
    with StateManager(theirs) as manager, manager.open_task(TASK) as running:
        running.store("totals").put_many(list(FOREIGN.items()))
        running.commit({"orders-0": 1})
        refused(mistyped, "1,000")
        refused(mistyped, "1,000", allow_new_stores=True)
        running.store("totals").put(b"more", b"theirs")
        running.commit({"orders-0": 2})
    assert totals(theirs, CHANGELOG)[TASK] == {**FOREIGN, b"more": b"theirs"}
    # the mistyped job lost nothing either
    assert totals(ours, "blob-store")[TASK] == {b"a": b"1"}


@pytest.mark.parametrize("when", ["between", "inside", "at its end"])
def test_somebody_else_writes_beside_a_running_job(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """FAULT 48, invariant 11: a foreign record below a marker would be restored as the job's own. The commit is
    refused, an aborted transaction does not count as such a record, and the next opening overwrites it."""
    config, foreign = job(kafka, tmp_path), [(b"a", b"foreign"), (b"x", b"foreign")]

    def write(phase: Phase = Phase.COMMIT_TRANSACTION, _: str = "") -> None:
        if phase is Phase.COMMIT_TRANSACTION:
            send(config, topic_of(config), foreign)

    def write_before_the_last(transaction: KafkaTransaction, topic: str, *args: Any, **kwargs: Any) -> None:
        if (topic, args[0]) == (topic_of(config), b"b2"):
            transaction._producer.flush(30)
            write()
        send_one(transaction, topic, *args, **kwargs)

    send_one = KafkaTransaction.send

    with StateManager(config) as manager, manager.open_task(TASK) as task:
        for number in (1, 2, 3):
            task.store("totals").put(b"a", b"%d" % number)
            with failing(Phase.SEND_CHECKPOINT), suppress(RetryableError):
                task.commit({"orders-0": number})
            task.commit({"orders-0": number})
        task.store("totals").put_many([(b"b%d" % number, b"4") for number in range(3)])
        if when == "between":
            write()
        elif when == "inside":
            monkeypatch.setattr(KafkaTransaction, "send", write_before_the_last)
        else:
            with observed(write):
                task.commit({"orders-0": 4})
            task.store("totals").put(b"b0", b"5")
        with pytest.raises(InvalidError, match="somebody else has written 2 records"):
            task.commit({"orders-0": 5})
        expected = dict(totals(config, "blob-store")[TASK])
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        assert dict(task.store("totals").range()) == expected
    assert totals(config, CHANGELOG)[TASK] == expected == state_of(committed(config, topic_of(config)))


def test_more_records_than_are_worth_counting(kafka: KafkaServer, tmp_path: Path) -> None:
    """Invariant 13: the count is bounded, and the error says that it is a lower bound."""
    config = job(kafka, tmp_path, backup=[CHANGELOG])
    write_as_others(config, {n.to_bytes(4, "big"): b"" for n in range(20_000)})
    refused(config, "at least 10,000", allow_empty_start=True)


def test_a_changelog_that_is_switched_on(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 48: if a running job starts to write a changelog that has records, it needs permission, and then deletes
    them."""
    config = job(kafka, tmp_path, backup=["blob-store"])
    commit(config, {b"a": b"1"}, 1)
    write_as_others(config)
    dual = with_changes(config, task__backup__factories=list(DUAL))
    refused(dual, "1,000")
    with StateManager(dual) as manager, manager.open_task(TASK, overwrite_changelog=True) as task:
        task.store("totals").put(b"b", b"2")
        task.commit({"orders-0": 2})
    assert state_of(committed(dual, topic_of(dual))) == {b"a": b"1", b"b": b"2"}


def test_a_changelog_that_was_recreated_and_written_to(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 48: a recreated topic with the same name is another topic, so its records are not the job's."""
    config = job(kafka, tmp_path)
    commit(config, {b"a": b"1"}, 1)
    recreate(config, topic_of(config))
    send(config, topic_of(config), FOREIGN.items())
    here = elsewhere(config, tmp_path / "other", "blob-store")
    refused(here, "1,000")
    recreate(config, topic_of(config))
    commit(here, {b"b": b"2"}, 2)  # an empty changelog is filled as usual
    assert totals(config, CHANGELOG)[TASK] == {b"a": b"1", b"b": b"2"}


@pytest.mark.parametrize("first", [True, False], ids=["first commit", "later"])
def test_records_that_come_after_the_opening(kafka: KafkaServer, tmp_path: Path, first: bool) -> None:
    """FAULT 48: if two jobs with the same changelog start at the same moment, the second one to commit is refused."""
    theirs = job(kafka, tmp_path / "theirs")
    ours = job(kafka, tmp_path / "ours", backup=["blob-store"])
    if not first:
        commit(ours, {b"a": b"1"}, 1)
    ours = with_changes(ours, task__backup__factories=list(DUAL), stores__totals__changelog__topic=topic_of(theirs))
    with StateManager(ours) as manager, manager.open_task(TASK) as task:
        commit(theirs, FOREIGN, 1)
        task.store("totals").put(b"b", b"2")
        with pytest.raises(PermissionNeeded, match=" 1,000 "):
            task.commit({"orders-0": 2})
    assert totals(theirs, CHANGELOG)[TASK] == FOREIGN


def test_the_jobs_own_records_need_no_permission(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 35 and 48: a job may switch its changelog off and on again, rename it and back, or remove a store and add
    it again."""
    config = job(kafka, tmp_path, task__checkpoint__retained=1)
    blobs = with_changes(config, task__backup__factories=["blob-store"], task__restore__factories=["blob-store"])
    renamed = with_changes(config, stores__totals__changelog__topic=f"{topic_of(config)}-2")
    commit(config, {b"a": b"1", b"gone": b"1"}, 1)
    for step, next_one in enumerate([blobs, blobs, config, renamed, blobs, config, renamed], 2):
        items = {b"a": str(step).encode(), b"gone": None}
        commit(elsewhere(next_one, tmp_path / str(step), "blob-store"), items, step)
    for of in (config, renamed):
        assert b"gone" not in state_of(committed(of, topic_of(of)))
    assert totals(renamed, CHANGELOG)[TASK] == {b"a": b"8"}
    # another store instead, and back
    other = JobConfig.from_mapping(
        {
            **{k: v for k, v in renamed.to_mapping().items() if not k.startswith("stores.")},
            "stores.other.value.serde": "bytes",
        }
    )
    commit(other, {b"x": b"1"}, 9, allow_new_stores=True, allow_removed_stores=True)
    commit(renamed, {b"y": b"1"}, 10, allow_new_stores=True, allow_removed_stores=True)
    assert totals(renamed, CHANGELOG)[TASK] == {b"y": b"1"}


def test_records_that_others_wrote_while_the_backend_was_off(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 48: the job's own marker explains the records that the job wrote, but no later ones."""
    config = job(kafka, tmp_path)
    blobs = with_changes(config, task__backup__factories=["blob-store"], task__restore__factories=["blob-store"])
    commit(config, {b"a": b"1"}, 1)
    commit(blobs, {b"a": b"2"}, 2)
    send(config, topic_of(config), [(b"b", b"theirs"), (b"c", b"theirs")])
    refused(elsewhere(config, tmp_path / "other", "blob-store"), "2")


def test_a_permission_is_for_one_opening(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 48: an opening whose commit fails does not make the records of others the job's own."""
    config = job(kafka, tmp_path, backup=["blob-store"])
    commit(config, {b"a": b"1"}, 1)
    dual = with_changes(config, task__backup__factories=list(DUAL))
    write_as_others(config)
    with failing(Phase.SEND_CHECKPOINT), pytest.raises(UnavailableError):
        commit(dual, {b"b": b"2"}, 2, overwrite_changelog=True)
    refused(dual, "1,000")
