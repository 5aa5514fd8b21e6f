"""Random histories of attempts in processes that are killed while they close."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.backends.blobs import snapshots
from statemgr.engine import checkpoint_to_bytes, prepared_from_bytes
from tests.commits import TASK, attempt
from tests.core.crash.attempts_child import Answer, Order, work
from tests.jobs import SEGMENTS, elsewhere, job_mapping
from tests.servers import KafkaServer

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.core.crash.attempts_child"])
_DISKS, _WORKERS, _KEYS = 2, 3, 3_000
State = dict[bytes, bytes]


class Worker:
    """A process that runs attempts on a disk."""

    def __init__(self, config: JobConfig, disk: Path) -> None:
        self.disk = disk
        self.config = elsewhere(config, disk, "blob-store")
        self.process: ForkServerProcess | None = None
        self.orders: Connection | None = None

    def run(self, order: Order) -> Connection:
        """Give an order to the process, or to a new one if it is dead. Returns: where the answer comes from."""
        if self.process is None or self.process.exitcode is not None:
            ours, theirs = _CONTEXT.Pipe()
            self.process = _CONTEXT.Process(target=work, args=(self.config.to_mapping(), theirs), daemon=True)
            self.process.start()
            theirs.close()
            self.orders = ours
        assert self.orders is not None
        try:
            self.orders.send(order)
        except OSError:  # it was killed since
            self.process.join(30)
            return self.run(order)
        return self.orders

    def ended(self) -> int | None:
        """The exit code of a dead process."""
        return None if self.process is None else self.process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None and self.process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            self.process.join(30)


class History:
    """A driver, some workers on two disks, and what is published."""

    def __init__(self, config: JobConfig, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.config = config
        self.seen: Counter[str] = Counter()
        disks = [directory / f"disk-{number}" for number in range(_DISKS)]
        self.workers = [Worker(config, disks[number % _DISKS]) for number in range(_WORKERS)]
        self.model: State = {}

    def live(self, driver: StateManager, batches: int) -> None:
        """Run batches: each with one or two attempts, of which one is published or none."""
        epoch = driver.acquire()
        items = {b"%05d" % number: self.random.randbytes(60) for number in range(_KEYS)}
        checkpoints = driver.publish([attempt(self.workers[0].config, epoch, TASK, items, 1)])
        self.model |= items
        epoch = epoch.after_publish()
        shutil.rmtree(self.workers[0].disk)
        for offset in range(2, batches + 2):
            self._faults()
            checkpoint = checkpoints[TASK]
            assert checkpoint is not None
            given = checkpoint_to_bytes(checkpoint), epoch.to_bytes()
            tried = []
            for worker in self.random.sample(self.workers, self.random.choice((1, 1, 2))):
                changes = self._changes()
                order = Order(*given, changes, offset, self.random.random() < 0.7, self._death())
                tried.append((worker, order, worker.run(order)))
            answers = [(order.changes, self._answer(worker, order, orders)) for worker, order, orders in tried]
            if self.random.random() < 0.2:
                self.seen["lost"] += 1
                continue
            changes, answer = self.random.choice(answers)
            checkpoints = driver.publish([prepared_from_bytes(answer.prepared)])
            epoch = epoch.after_publish()
            changed: dict[bytes, bytes | None] = {**self.model, **changes}
            self.model = {key: value for key, value in changed.items() if value is not None}

    def _answer(self, worker: Worker, order: Order, orders: Connection) -> Answer:
        assert orders.poll(60), (worker.disk, worker.ended())
        try:
            answer: Answer = orders.recv()
        except (EOFError, OSError):  # it died: the engine runs the attempt again
            assert worker.process is not None
            worker.process.join(30)
            self._count(worker)
            return self._answer(worker, order, worker.run(order))
        assert answer.found == self.model, f"restored from {answer.factory}, {answer.bytes_to_come} to come"
        self.seen["by need" if answer.bytes_to_come else answer.factory] += 1
        return answer

    def _changes(self) -> dict[bytes, bytes | None]:
        keys = [b"%05d" % self.random.randrange(_KEYS + 500) for _ in range(self.random.choice((1, 20, 300)))]
        return {key: self.random.choice((None, b"new", self.random.randbytes(80))) for key in keys}

    def _death(self) -> int | None:
        return self.random.randrange(25) if self.random.random() < 0.5 else None

    def _count(self, worker: Worker) -> None:
        if worker.ended() is not None:
            assert worker.ended() == -signal.SIGKILL, worker.ended()
            self.seen["killed"] += 1
            worker.process = None

    def _faults(self) -> None:
        """Count the dead, kill a worker at any moment, or lose the disk of dead ones."""
        for worker in self.workers:
            self._count(worker)
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * 0.05)
            self.random.choice(self.workers).kill()
        if self.random.random() < 0.2:
            disk = self.random.choice(self.workers).disk
            for worker in self.workers:
                if worker.disk == disk:
                    worker.kill()
            shutil.rmtree(disk, ignore_errors=True)


@contextmanager
def ending(workers: list[Worker]) -> Iterator[None]:
    """End all processes at the end of a block."""
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(2, 31))])
def test_random_histories(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Attempts on two machines and in three processes, retries, speculation, attempts that are not published, and lost
    disks: each attempt sees exactly what was published."""
    monkeypatch.setattr(snapshots, "_LARGE", 4 * 1024)
    mapping = job_mapping(
        kafka, tmp_path, backup=("blob-store",), kind=SEGMENTS, task__restore__by__need__bytes=1,
        task__commit__snapshot__interval=["6 commits", "256 MiB", "10 min"],
        stores__totals__rocksdb__compression="none", stores__totals__rocksdb__target__file__size__bytes=64 * 1024,
    )  # fmt: skip
    config = JobConfig.from_mapping(mapping)
    history = History(config, tmp_path, seed)
    with ending(history.workers), StateManager(config) as driver:
        history.live(driver, 25)
    assert history.seen["killed"] > 1, history.seen
    assert history.seen["by need"] > 0, history.seen
