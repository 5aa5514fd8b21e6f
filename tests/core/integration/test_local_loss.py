"""Local files that rot or vanish while they are in use: the next opening restores them from a backend by itself."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager, Task
from statemgr.engine import open_attempt
from statemgr.engine.host import attempt_host
from statemgr.errors import LocalStateLost, RetryableError
from statemgr.phases import Phase, observed
from tests.commits import TASK, attempt, blob_files, commit, published, referenced, totals, write
from tests.jobs import ALL, job_mapping
from tests.servers import KafkaServer

LONG = pytest.mark.long
#: One kind of backup for `make test`; the long tests take all kinds.
ONE = [pytest.param(*of, marks=() if of == ALL[2] else LONG) for of in ALL]
MODEL = {b"%04d" % n: random.Random(n).randbytes(500) for n in range(1000)}


def job(kafka: KafkaServer, directory: Path, *factories: str, **more: object) -> JobConfig:
    """A job of one task; with ``MODEL``, its tables are too large to be hashed each time they are found."""
    return JobConfig.from_mapping(job_mapping(kafka, directory, backup=factories, **more))  # type: ignore[arg-type]


def tables(config: JobConfig) -> list[Path]:
    """The table files of the local copies, sorted by size with the largest last."""
    root = config.state_dir / config.job_name / config.job_id / "Partition_0" / "totals" / "committed"
    return sorted(root.rglob("*.sst"), key=lambda path: path.stat().st_size)


def flip(path: Path, at: int | None = None, *, touched: bool = False) -> None:
    """Flip one bit in a file and all its hard links. The size stays, and so does the time unless ``touched``."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2 if at is None else before.st_size + at)
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    if not touched:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def read_each(task: Task) -> None:
    """Read every key on its own."""
    for key in MODEL:
        task.store("totals").get(key)


def read_many(task: Task) -> None:
    """Read all keys at once."""
    task.store("totals").get_many(list(MODEL))


def scan(task: Task) -> None:
    """Read all items in order."""
    for _ in task.store("totals").range():
        pass


@pytest.mark.parametrize(
    ("use", "factory", "kind"),
    [
        pytest.param(use, *of, marks=() if of == ALL[number] else LONG)
        for number, use in enumerate((read_each, read_many, scan))
        for of in ALL
    ],
)
def test_a_rotten_file_is_found_at_a_read_and_restored(
    kafka: KafkaServer, tmp_path: Path, use: Callable[[Task], None], factory: str, kind: str
) -> None:
    """FAULT 44: a bit of a table flips while its size and time stay. The read fails and says to open the task again,
    and no commit of this task succeeds. The next opening restores from the backend, and the one after it is local
    again."""
    config = job(kafka, tmp_path, factory, kind=kind)
    commit(config, dict(MODEL), 1)
    flip(tables(config)[-1])
    with StateManager(config) as manager:
        with manager.open_task(TASK) as task:
            assert task.restored[0].factory == "local", "nothing that is cheap to look at has changed"
            write(task, {b"new": b"1"})
            with pytest.raises(LocalStateLost, match="open the task again") as lost:
                use(task)
            assert (lost.value.where["task"], lost.value.where["store"]) == (TASK, "totals")
            for _ in range(2):
                with pytest.raises(LocalStateLost):
                    task.commit({"orders-0": 2})
        with manager.open_task(TASK) as task:
            assert task.restored[0].factory == factory
            assert task.last_checkpoint is not None
            assert task.last_checkpoint.input_offsets == {"orders-0": 1}
            assert dict(task.store("totals").range()) == MODEL
            write(task, {b"new": b"1"})
            task.commit({"orders-0": 2})
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        assert task.restored[0].factory == "local"
        assert dict(task.store("totals").range()) == MODEL | {b"new": b"1"}
    assert totals(config, factory)[TASK] == MODEL | {b"new": b"1"}


@pytest.mark.parametrize(("factory", "kind"), [pytest.param(*of, marks=LONG if of == ALL[1] else ()) for of in ALL])
def test_a_file_that_is_no_table_any_more_is_restored_at_once(
    kafka: KafkaServer, tmp_path: Path, factory: str, kind: str
) -> None:
    """FAULT 44: if the opening itself meets the flipped bit, the same opening restores from the backend, although an
    older directory on the machine shares the file."""
    config = job(kafka, tmp_path, factory, kind=kind, task__checkpoint__retained=3)
    commit(config, dict(MODEL), 1)
    commit(config, {b"more": bytes(100_000)}, 2)
    for at in (-1, -20):
        flip(tables(config)[-1], at)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        assert task.restored[0].factory == factory
        assert dict(task.store("totals").range()) == MODEL | {b"more": bytes(100_000)}


@pytest.mark.parametrize(
    ("factory", "kind", "touched"),
    [
        pytest.param(*of, touched, marks=() if touched == (of == ALL[2]) else LONG)
        for of in ALL[1:]
        for touched in (False, True)
    ],
)
def test_a_rotten_file_is_never_uploaded_as_a_new_one(
    kafka: KafkaServer, tmp_path: Path, factory: str, kind: str, touched: bool
) -> None:
    """FAULT 44: a commit that makes a snapshot refuses a shared table that was visibly altered, and otherwise refers to
    the stored table, so that the backend's state stays exact."""
    config = job(kafka, tmp_path, factory, kind=kind)
    commit(config, dict(MODEL), 1)
    with StateManager(config) as manager:
        with manager.open_task(TASK) as task:
            flip(tables(config)[-1], touched=touched)
            write(task, {b"new": b"1"})
            if touched:
                with pytest.raises(LocalStateLost, match="altered"):
                    task.commit({"orders-0": 2}, materialize=True)
            else:
                task.commit({"orders-0": 2}, materialize=True)
        with manager.open_task(TASK) as task:
            if not touched:
                with pytest.raises(LocalStateLost):
                    scan(task)
        with manager.open_task(TASK) as task:
            expected = MODEL if touched else MODEL | {b"new": b"1"}
            assert dict(task.store("totals").range()) == expected
            task.commit({"orders-0": 3})
    assert totals(config, factory)[TASK] == expected


@pytest.mark.parametrize(("factory", "kind"), ONE[1:])
def test_a_rotten_file_that_is_found_during_a_commit_is_not_trusted_by_its_local_copy(
    kafka: KafkaServer, tmp_path: Path, factory: str, kind: str
) -> None:
    """FAULT 44: if a read finds the damage while a commit uploads a snapshot that shares the file, the commit fails and
    the next opening restores the last committed state."""
    config = job(kafka, tmp_path, factory, kind=kind)
    commit(config, dict(MODEL), 1)
    flip(tables(config)[-1])
    uploading, found = threading.Event(), threading.Event()

    def wait(phase: Phase, _: str) -> None:
        if phase is Phase.PUT_INDEX:
            uploading.set()
            assert found.wait(30)

    with StateManager(config) as manager:
        with manager.open_task(TASK) as task:
            write(task, {b"new": b"1"})
            with observed(wait):
                committing = task.commit_async({"orders-0": 2}, materialize=True)
                assert uploading.wait(30)
                with pytest.raises(LocalStateLost):
                    scan(task)
                found.set()
                with pytest.raises(LocalStateLost):
                    committing.result(30)
        with manager.open_task(TASK) as task:
            assert dict(task.store("totals").range()) == MODEL


@pytest.mark.parametrize(("factory", "kind"), ONE)
def test_state_dir_deleted_under_an_open_task(kafka: KafkaServer, tmp_path: Path, factory: str, kind: str) -> None:
    """FAULT 47: later commits succeed, or end in an error that says to open the task again. No committed change is
    lost, even in the same process."""
    config = job(kafka, tmp_path, factory, kind=kind)
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        write(task, dict(MODEL))
        task.commit({"orders-0": 1})
        for number in range(2, 6):
            shutil.rmtree(config.state_dir, ignore_errors=True)
            more = {b"more-%d" % n: random.Random(n).randbytes(1000) for n in range(number)}
            for _ in range(2):
                try:
                    write(task, more)
                    task.commit({"orders-0": number}, materialize=number % 2 == 1)
                    break
                except LocalStateLost:
                    task.close()
                    task = manager.open_task(TASK)
                    assert task.last_checkpoint is not None
                    assert task.last_checkpoint.input_offsets == {"orders-0": number - 1}
            else:
                pytest.fail("the task that was opened again cannot commit")
        task.close()
        with manager.open_task(TASK) as task:
            assert dict(task.store("totals").range()) == MODEL | more
    assert totals(config, factory)[TASK] == MODEL | more


@pytest.mark.parametrize(("factory", "kind"), ONE)
@pytest.mark.parametrize("what", ["state", "owners"])
def test_state_dir_deleted_between_the_attempts_of_a_worker(
    kafka: KafkaServer, tmp_path: Path, factory: str, kind: str, what: str
) -> None:
    """FAULT 47: a worker lives for many attempts and remembers its directories. If they vanish, the next attempt
    restores, even if they vanished during an attempt."""
    config = job(kafka, tmp_path / "driver", factory, kind=kind)
    worker = JobConfig.from_mapping({**config.to_mapping(), "state.dir": str(tmp_path / "worker")})
    host = attempt_host(worker)
    with StateManager(config) as manager:
        epoch = manager.acquire()
        checkpoints = epoch.checkpoints
        for number in range(1, 5):
            items = dict(MODEL) if number == 1 else {b"n": b"%d" % number, b"%d" % number: b"1"}
            checkpoints = manager.publish([attempt(worker, epoch, TASK, items, number, None, checkpoints)])
            epoch = epoch.after_publish()
            if what == "state":
                shutil.rmtree(worker.state_dir)
            else:
                for signs in worker.state_dir.rglob("owners"):
                    shutil.rmtree(signs)
        with open_attempt(worker, TASK, checkpoints[TASK], epoch) as opened:
            opened.store("totals").put(b"lost", b"1")
            shutil.rmtree(worker.state_dir)
            with suppress(LocalStateLost):
                opened.prepare({"orders-0": 5})
        manager.publish([attempt(worker, epoch, TASK, {b"n": b"5"}, 5, None, checkpoints)])
    assert attempt_host(worker) is host
    assert published(config, factory)[TASK]["totals"] == MODEL | {b"n": b"5", b"2": b"1", b"3": b"1", b"4": b"1"}


def test_a_rotten_file_under_an_attempt_is_for_the_next_one_to_restore(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 44: an engine repeats an attempt after a retryable error, and the second attempt has the backend's
    state."""
    config = job(kafka, tmp_path, "blob-store")
    with StateManager(config) as manager:
        epoch = manager.acquire()
        checkpoints = manager.publish([attempt(config, epoch, TASK, dict(MODEL), 1)])
        epoch = epoch.after_publish()
        flip(tables(config)[-1])
        with open_attempt(config, TASK, checkpoints[TASK], epoch) as opened:
            assert opened.restored[0].factory == "local"
            with pytest.raises(RetryableError):
                list(opened.store("totals").range())
            with pytest.raises(LocalStateLost):
                opened.prepare({"orders-0": 2})
        with open_attempt(config, TASK, checkpoints[TASK], epoch) as opened:
            assert opened.restored[0].factory == "blob-store"
            assert dict(opened.store("totals").range()) == MODEL
    assert blob_files(tmp_path) == referenced(config)
