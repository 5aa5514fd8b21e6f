"""An attempt that has returned its commit leaves a local copy for the next attempt, perhaps on another thread."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import get_context
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.engine import (
    Attempt,
    Epoch,
    PreparedCommit,
    checkpoint_from_bytes,
    checkpoint_to_bytes,
    open_attempt,
    prepared_from_bytes,
    prepared_to_bytes,
)
from statemgr.engine.host import _host, attempt_host
from statemgr.errors import DiskFull
from statemgr.flows.committing import local_copies
from statemgr.local.directories import StoreDirectories
from statemgr.model.checkpoint import Checkpoint
from statemgr.phases import Phase, observed
from statemgr.stores.open_store import OpenStore
from tests.commits import TASK, totals
from tests.jobs import SEGMENTS, SNAPSHOTS, elsewhere, job_mapping
from tests.servers import KafkaServer

FACTORY = "blob-store"


class Batches:
    """A job of one task, and an executor on a machine of its own."""

    def __init__(self, kafka: KafkaServer, directory: Path, kind: str) -> None:
        mapping = job_mapping(kafka, directory, backup=(FACTORY,), kind=kind)
        self.config = JobConfig.from_mapping(mapping)  # type: ignore[arg-type]
        self.there = elsewhere(self.config, directory / "executor", FACTORY)
        self.model: dict[bytes, bytes] = {}
        self.driver = StateManager(self.config)
        self.epoch = self.driver.acquire()
        self.checkpoints: Mapping[str, Checkpoint | None] = self.epoch.checkpoints

    def open(self) -> Attempt:
        """Open an attempt at the next batch."""
        return open_attempt(self.there, TASK, self.checkpoints[TASK], self.epoch)

    def prepared(self, opened: Attempt) -> PreparedCommit:
        """Prepare a batch that writes more than fits into the checkpoint."""
        items = {b"%d" % (len(self.model) + number): b"v" * 100 for number in range(500)}
        opened.stores["totals"].put_many(items)
        self.model |= items
        return opened.prepare({"orders-0": len(self.model)})

    def publish(self, prepared: PreparedCommit) -> None:
        """Make a commit the current one, and compare the stored state with the model."""
        self.checkpoints = self.driver.publish([prepared])
        self.epoch = self.epoch.after_publish()
        assert totals(self.config, FACTORY) == {TASK: self.model}

    def committed(self) -> list[str]:
        """The names of the local copies on the executor."""
        task = self.there.state_dir / self.there.job_name / self.there.job_id / "Partition_0"
        return [path.name for path in (task / "totals" / "committed").iterdir() if path.is_dir()]


@pytest.fixture
def batches(kafka: KafkaServer, tmp_path: Path) -> Iterator[Batches]:
    """A job after its first batch, which stores a snapshot and therefore makes a directory before it is published."""
    made = Batches(kafka, tmp_path, SEGMENTS)
    with made.driver:
        with made.open() as opened:
            first = made.prepared(opened)
        made.publish(first)
        yield made


def test_the_next_attempt_of_a_process_waits_for_the_copy(batches: Batches) -> None:
    """The next attempt starts from the copy and fetches nothing, and at most two copies remain."""
    waiting, go_on = threading.Event(), threading.Event()

    def slow(phase: Phase, subject: str) -> None:
        if phase is Phase.LOCAL_COPY and threading.current_thread() is not threading.main_thread():
            waiting.set()
            assert go_on.wait(60)

    with observed(slow):
        for _ in range(4):
            waiting.clear()
            go_on.clear()
            opened = batches.open()
            assert [one.factory for one in opened.restored] == ["local"]
            prepared = batches.prepared(opened)
            opened.close(wait=False)
            assert waiting.wait(60), "the caller goes on while another thread makes the copy"
            batches.publish(prepared)
            threading.Timer(0.2, go_on.set).start()
    attempt_host(batches.there).closing.wait()
    assert len(batches.committed()) <= 2


@pytest.mark.parametrize("kind", [SEGMENTS, SNAPSHOTS])
def test_copies_do_not_add_up(kafka: KafkaServer, tmp_path: Path, kind: str) -> None:
    """Whether a commit stores changes or a snapshot, at most the newest copy and the one before it stay."""
    made = Batches(kafka, tmp_path, kind)
    with made.driver:
        for _ in range(5):
            with made.open() as opened:
                prepared = made.prepared(opened)
            made.publish(prepared)
            assert len(made.committed()) <= 2
        with made.open() as opened:
            unchanged = opened.prepare({"orders-0": 0})
        made.publish(unchanged)
        assert made.committed() == [made.checkpoints[TASK].stores["totals"]]


def test_an_attempt_of_another_process_does_not_wait_for_the_copy(batches: Batches) -> None:
    """The attempt starts from an older copy and the segments since then, and the late copy does no harm."""
    go_on = threading.Event()

    def slow(phase: Phase, subject: str) -> None:
        if phase is Phase.LOCAL_COPY and threading.current_thread() is not threading.main_thread():
            assert go_on.wait(60)

    host = attempt_host(batches.there)
    with observed(slow):
        opened = batches.open()
        prepared = batches.prepared(opened)
        opened.close(wait=False)
        batches.publish(prepared)
        _host.cache_clear()  # the next attempt belongs to another process
        with batches.open() as other:
            assert [one.factory for one in other.restored] == [FACTORY]
            assert [one.bytes_reused > 0 for one in other.restored] == [True]
            assert dict(other.stores["totals"].range()) == batches.model
            prepared = batches.prepared(other)
        go_on.set()
        host.closing.wait()
    batches.publish(prepared)
    with batches.open() as last:
        assert dict(last.stores["totals"].range()) == batches.model
        batches.publish(batches.prepared(last))


@pytest.mark.parametrize("error", [DiskFull("no space is left"), OSError("no space is left")])
def test_a_copy_that_cannot_be_written_fails_no_commit(
    batches: Batches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """If the disk is full after the commit was prepared, a warning is logged and the next attempt fetches the changes.
    Older copies are removed all the same, or the disk would stay full."""

    def full(store: OpenStore) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(OpenStore, "leave_copy", full)
        for _ in range(4):
            with batches.open() as opened:
                prepared = batches.prepared(opened)
            batches.publish(prepared)
            assert len(batches.committed()) <= 2
    assert "Partition 0: no local copy is left for the next attempt: no space is left" in caplog.text
    with batches.open() as opened:
        assert [one.factory for one in opened.restored] == [FACTORY]
        assert dict(opened.stores["totals"].range()) == batches.model
        batches.publish(batches.prepared(opened))


def test_attempts_that_fail_leave_no_copies(batches: Batches, tmp_path: Path) -> None:
    """On a machine where attempts restore their stores and fail, while those of another machine are published, copies
    do not add up."""
    here, other = batches.there, elsewhere(batches.config, tmp_path / "other", FACTORY)
    for _ in range(4):
        batches.there = here
        with batches.open() as failed:
            assert dict(failed.stores["totals"].range()) == batches.model
        assert len(batches.committed()) <= 2
        batches.there = other
        with batches.open() as opened:
            prepared = batches.prepared(opened)
        batches.publish(prepared)


def test_a_full_disk_is_cleaned_up_although_no_attempt_opens(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that were killed have left directories. The next try has the room that they took."""
    with batches.open() as opened:
        live = opened._open["totals"].live.parent
    left = live / f"1-{0:016x}.{1:016x}"  # its owner is dead
    left.mkdir()

    def full(self: StoreDirectories, committed: object) -> Path:
        raise DiskFull("no space is left")

    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectories, "clone", full)
        with pytest.raises(DiskFull):
            batches.open()
    assert not left.exists()
    with batches.open() as opened:
        assert dict(opened.stores["totals"].range()) == batches.model


def test_damage_that_the_copy_finds_is_noted(batches: Batches) -> None:
    """The commit has what it needs. The copies of this machine may share the damaged file, so they are in doubt."""
    opened = batches.open()
    prepared = batches.prepared(opened)
    for table in opened._open["totals"].live.glob("*.sst"):
        table.unlink()
    opened.close()
    assert opened._open["totals"].lost is not None
    batches.publish(prepared)
    with batches.open() as after:
        assert dict(after.stores["totals"].range()) == batches.model


def _dies_while_it_closes(job: Mapping[str, object], published: tuple[bytes, bytes], steps: int, answer: Path) -> None:
    """In a process of its own: prepare a batch, and get SIGKILL after so many changes of local files in the close."""
    config = JobConfig.from_mapping(job)
    epoch, checkpoint = Epoch.from_bytes(published[0]), checkpoint_from_bytes(published[1])
    opened = open_attempt(config, TASK, checkpoint, epoch)
    opened.stores["totals"].put_many({b"of the killed %d" % number: b"v" * 100 for number in range(500)})
    (answer.parent / "part").write_bytes(prepared_to_bytes(opened.prepare({"orders-0": 1})))
    os.rename(answer.parent / "part", answer)
    left = itertools.count(steps, -1)

    def hook(event: str, arguments: object) -> None:
        if event in ("os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree") and not next(left):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    opened.close(wait=steps % 2 == 0)
    attempt_host(config).closing.wait()


@pytest.mark.parametrize("is_published", [True, pytest.param(False, marks=pytest.mark.long)])
def test_killed_while_it_closes(
    batches: Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_published: bool
) -> None:
    """SIGKILL at any change of local files in the close, after a commit that is published or lost: the next attempt on
    this machine has exactly what is published, and nothing of the dead one stays."""
    monkeypatch.setattr(local_copies, "_LIMIT", 10**6)  # a compacted copy would be one more
    context, codes = get_context("spawn"), []
    for steps in (0, 2, 5, 9):
        answer = tmp_path / f"prepared-{steps}"
        checkpoint = batches.checkpoints[TASK]
        assert checkpoint is not None
        given = batches.epoch.to_bytes(), checkpoint_to_bytes(checkpoint)
        child = context.Process(target=_dies_while_it_closes, args=(batches.there.to_mapping(), given, steps, answer))
        child.start()
        child.join(60)
        codes.append(child.exitcode)
        if is_published:
            batches.model |= {b"of the killed %d" % number: b"v" * 100 for number in range(500)}
            batches.publish(prepared_from_bytes(answer.read_bytes()))
        with batches.open() as opened:
            assert dict(opened.stores["totals"].range()) == batches.model
            prepared = batches.prepared(opened)
        batches.publish(prepared)
        assert len(batches.committed()) <= 2
    assert codes.count(-signal.SIGKILL) >= 3, codes
    live = batches.there.state_dir / batches.there.job_name / batches.there.job_id / "Partition_0" / "totals" / "live"
    assert list(live.iterdir()) == []


def test_a_compaction_that_ends_during_an_attempt_is_kept(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt knows only the compactions that ended before it was opened, and removes no later one."""
    monkeypatch.setattr(local_copies, "_LIMIT", 10**6)  # none but that of this test
    for _ in range(3):
        with batches.open() as opened:
            prepared = batches.prepared(opened)
        batches.publish(prepared)
    with batches.open() as opened:
        [older] = {*batches.committed()} - {batches.checkpoints[TASK].stores["totals"]}  # type: ignore[union-attr]
        attempt_host(batches.there).compactions._compact(opened._open["totals"], older)
        prepared = batches.prepared(opened)
    batches.publish(prepared)
    assert older in batches.committed()
    with batches.open() as after:
        assert [one.factory for one in after.restored] == [FACTORY], "it begins with the compacted copy"
        assert dict(after.stores["totals"].range()) == batches.model
