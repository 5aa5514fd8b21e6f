"""Problems of machines and their configuration: full disks, slow calls, clocks that go back, secrets."""

from __future__ import annotations

import logging
import random
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from uuid import uuid4

import pytest

from statemgr import JobConfig, StateManager
from statemgr.blobs.file import FileBlobStore
from statemgr.errors import AccessDenied, DiskFull, OutcomeUnknownError, RetryableError, StatemgrError
from statemgr.ids import IdSource
from statemgr.local.machine import SystemClock
from tests.commits import TASK, commit, totals, write
from tests.jobs import DUAL, INTERVALS, SNAPSHOTS, elsewhere, job_mapping, with_changes
from tests.servers import KafkaServer, S3Server
from tests.small_disks import fill


def job(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    """A job with both backends on a directory of blobs."""
    return JobConfig.from_mapping(job_mapping(kafka, directory, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", INTERVALS)
def test_a_full_disk_fails_a_commit_and_a_restore_and_no_state(
    kafka: KafkaServer, small_disk: Path, tmp_path: Path, kind: str
) -> None:
    """FAULT 24: on a full disk, a restore and a commit that makes a directory fail with DiskFull. Both succeed without
    loss when space returns. A commit of changes alone needs no space."""
    config = job(kafka, tmp_path, kind=kind, state__dir=str(small_disk / "state"))
    ballast = small_disk / "ballast"
    model = {b"%04d" % n: random.Random(n).randbytes(1000) for n in range(1000)}
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"0000": b"old"})
        task.commit({"orders-0": 1})
        write(task, dict(model))
        fill(ballast)
        with pytest.raises(DiskFull) if kind == SNAPSHOTS else nullcontext():
            task.commit({"orders-0": 2})
        assert task.last_checkpoint is not None
        assert task.last_checkpoint.input_offsets == {"orders-0": 1 if kind == SNAPSHOTS else 2}
        ballast.unlink()
        task.commit({"orders-0": 3})
    for factory in DUAL:
        assert totals(config, factory)[TASK] == model
    shutil.rmtree(small_disk / "state")
    for factory in DUAL:
        moved = with_changes(config, task__restore__factories=[factory], state__dir=str(small_disk / factory))
        fill(ballast, leave=600_000)
        with StateManager(moved) as manager, pytest.raises(DiskFull):
            manager.open_task(TASK)
        ballast.unlink()
        with StateManager(moved) as manager, manager.open_task(TASK) as task:
            assert task.restored[0].factory == factory
            assert dict(task.store("totals").range()) == model
        shutil.rmtree(small_disk / factory)


def test_secrets_are_in_nothing_that_is_said(
    kafka: KafkaServer,
    s3: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """FAULT 30: a wrong S3 secret and a wrong SASL password, given by reference, appear in no log, repr or error."""
    if s3.server == "moto":
        pytest.skip("moto takes any key")
    caplog.set_level(logging.DEBUG, logger="statemgr")
    secret, password = "s3-secret-5f0c9a1b7e", "sasl-password-77d1c4e2"
    monkeypatch.setenv("TEST_S3_SECRET", secret)
    monkeypatch.setenv("TEST_SASL_PASSWORD", password)
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, s3=s3, backup=("blob-store",))
        | {"blob.store.s3.secret.key": "${env:TEST_S3_SECRET}", "blob.store.s3.path.style": True}
    )
    said = [repr(config), str(config.to_mapping())]
    with StateManager(config) as manager:
        said.append(repr(manager) + repr(vars(manager)))
        with pytest.raises(AccessDenied) as denied:
            _open_and_commit(manager)
    said.append(_told(denied.value))
    sasl = with_changes(
        config,
        kafka__security__protocol="SASL_PLAINTEXT",
        kafka__sasl__mechanism="PLAIN",
        kafka__sasl__username="user",
        kafka__sasl__password="${env:TEST_SASL_PASSWORD}",
    )
    with StateManager(sasl) as manager, pytest.raises(StatemgrError) as unreachable:
        manager.open_task(TASK)
    said.append(_told(unreachable.value) + repr(sasl) + str(sasl.to_mapping()))
    said.append(caplog.text)
    for text in said:
        assert secret not in text
        assert password not in text


def _open_and_commit(manager: StateManager) -> None:
    with manager.open_task(TASK) as task:
        write(task, {b"a": b"1"})
        task.commit({"orders-0": 1})


def _told(error: StatemgrError) -> str:
    import traceback

    return "".join(traceback.format_exception(error)) + error.to_json() + repr(error.where) + str(error.hint)


def test_a_commit_ends_within_its_time(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULT 9, A35, invariant 13: if the blob store hangs, a commit ends with OutcomeUnknownError at the deadline,
    because it goes on, and a later commit publishes everything."""
    # a new broker's first transaction takes longer than the one-second timeout below
    commit(job(kafka, tmp_path / "first"), {b"a": b"1"}, 1)
    config = job(kafka, tmp_path, task__commit__timeout__ms=1_000)
    put = FileBlobStore.put
    slow = [3.0]

    def hang(self: FileBlobStore, *args: object, **more: object) -> None:
        if slow:
            time.sleep(slow.pop())
        put(self, *args, **more)  # type: ignore[arg-type]

    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"a": b"1"})
        monkeypatch.setattr(FileBlobStore, "put", hang)
        with pytest.raises(OutcomeUnknownError, match=r"task\.commit\.timeout\.ms"):
            task.commit({"orders-0": 1})
        write(task, {b"b": b"2"})
        for _ in range(10):  # the first commit continues, and the next one waits for it
            try:
                task.commit({"orders-0": 2})
                break
            except (RetryableError, OutcomeUnknownError):
                assert task.last_checkpoint is None or task.last_checkpoint.input_offsets == {"orders-0": 1}
    for factory in DUAL:
        assert totals(config, factory)[TASK] == {b"a": b"1", b"b": b"2"}


def test_a_clock_that_goes_back_changes_no_order(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 25: an owner whose clock is a day behind continues from the newest checkpoint, and its own commits are
    newer."""
    config = job(kafka, tmp_path)
    first = commit(config, {b"a": b"1"}, 1)
    time_ns = SystemClock.time_ns
    monkeypatch.setattr(SystemClock, "time_ns", lambda self: time_ns(self) - 24 * 3600 * 10**9)
    monkeypatch.setattr("statemgr.wiring.system_ids", lambda: IdSource(SystemClock().time_ns, lambda: uuid4().hex))
    late = elsewhere(config, tmp_path / "late", "blob-store")
    with StateManager(late) as manager, manager.open_task(TASK) as task:
        assert task.last_checkpoint == first
        write(task, {b"a": b"2"})
        second = task.commit({"orders-0": 2})
    assert second.checkpoint_id.millis < first.checkpoint_id.millis, "the clock did go back"
    assert (second.sequence, second.epoch > first.epoch) == (2, True)
    monkeypatch.undo()
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        assert task.last_checkpoint == second
        assert dict(task.store("totals").range()) == {b"a": b"2"}
    for factory in DUAL:
        assert totals(config, factory)[TASK] == {b"a": b"2"}
