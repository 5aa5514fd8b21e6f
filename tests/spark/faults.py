"""Process functions that fail in one attempt of a cluster query and record it in a directory."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from spark_integration import StateContext
from statemgr import Store
from statemgr.phases import Phase, add_observer
from tests.spark.conftest import count

#: The longest wait for another attempt, in seconds.
_PATIENCE = 300


def first(flag: Path) -> bool:
    """Return whether this call creates the file, for the first time in any process."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def wait_for(*flags: Path) -> None:
    """Wait until one of these files exists. Raises: TimeoutError."""
    deadline = time.monotonic() + _PATIENCE
    while not any(flag.exists() for flag in flags):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody made {' or '.join(map(str, flags))}")
        time.sleep(0.02)


def executor() -> psutil.Process:
    """Return the JVM that this worker belongs to."""
    parents = psutil.Process().parents()
    (found,) = (one for one in parents if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline()))
    return found


def kill_executor() -> None:
    """Kill this worker's executor (the JVM and all of its workers), as the loss of its machine would."""
    jvm = executor()
    family = jvm.children(recursive=True)
    for process in [jvm, *(one for one in family if one.pid != os.getpid())]:
        process.send_signal(signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class AtPhases:
    """A counting function that calls :meth:`at` in the worker at each phase of its attempts, even the first."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # only a worker unpickles this, before it opens its attempt
        vars(self).update(state)
        global _current
        _current = self
        if _announced not in _installed:
            _installed.append(_announced)
            add_observer(_announced)

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Count as :func:`count` does."""
        yield from count(batches, stores, context)

    def at(self, phase: Phase, subject: str) -> None:
        """Handle an announced phase."""


#: The function of this worker's newest batch. Spark reuses a worker for later batches.
_current: AtPhases | None = None
_installed: list[Callable[[Phase, str], None]] = []


def _announced(phase: Phase, subject: str) -> None:
    if _current is not None:
        _current.at(phase, subject)


class KilledIn(AtPhases):
    """A counting function that kills the executor of the first attempt that reaches a phase."""

    def __init__(self, directory: str, phase: str) -> None:
        super().__init__(directory)
        self.phase = phase

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Count, and store more than fits into the row that an attempt returns."""
        yield from count(batches, stores, context)
        stores["totals"].put(b"!attempt", os.urandom(200_000))

    def at(self, phase: Phase, subject: str) -> None:
        """Record the phase and kill the executor."""
        (self.directory / f"seen-{phase}").touch()
        if phase == self.phase and first(self.directory / f"killed-{phase}"):
            kill_executor()


class Straggling(AtPhases):
    """A counting function whose first attempt at task 0 of a batch waits for another attempt at it.

    Args:
        both: let neither attempt end before both have prepared their commits. Otherwise, the first waits for the end of
            the second, and Spark kills it.
    """

    def __init__(self, directory: str, both: bool) -> None:
        super().__init__(directory)
        self.both = both
        self.attempt: tuple[int, bool] | None = None

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Count, and mark the first attempt at task 0."""
        self.attempt = None
        if context.task == "Partition 0":
            self.attempt = context.sequence, first(self.directory / f"{context.sequence}-begun")
        yield from count(batches, stores, context)

    def at(self, phase: Phase, subject: str) -> None:
        """Meet the other attempt when everything is prepared."""
        if phase is not Phase.PREPARED or self.attempt is None:
            return
        sequence, is_first = self.attempt
        slow, fast = (self.directory / f"{sequence}-{name}" for name in ("slow", "fast"))
        if is_first:
            if self.both:
                slow.touch()
            wait_for(fast)
            if not self.both:
                time.sleep(_PATIENCE)  # Spark kills this attempt
        else:
            if self.both:
                wait_for(slow)
            fast.touch()


class Busy(AtPhases):
    """A counting function that takes more than a second, so that Spark requests executors. It records its executor."""

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Count, then sleep."""
        (self.directory / str(executor().pid)).touch()
        yield from count(batches, stores, context)
        time.sleep(1.5)


class Broken(AtPhases):
    """A counting function that always fails on the executor of the first attempt at a task."""

    def __init__(self, directory: str, task: str) -> None:
        super().__init__(directory)
        self.task = task

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Count, or fail."""
        broken = self.directory / str(executor().pid)
        if context.task == self.task and (first(self.directory / "broken") or broken.exists()):
            broken.touch()
            raise OSError("this machine has no such file")
        yield from count(batches, stores, context)


class LosingShuffle(AtPhases):
    """A counting function whose first attempt of a batch reads its rows, then deletes the cluster's shuffle files."""

    def __init__(self, directory: str, disks: str) -> None:
        super().__init__(directory)
        self.disks = Path(disks)

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Count, which reads all rows, then delete the files."""
        yield from count(batches, stores, context)
        if first(self.directory / f"{context.sequence}-lost"):
            for file in self.disks.rglob("shuffle_*"):
                file.unlink(missing_ok=True)


def run_of_map_task(rows: DataFrame, directory: str) -> DataFrame:
    """Return the same rows, and record each run of a task that reads them."""

    def note(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        (Path(directory) / f"{context.partitionId()}-{context.taskAttemptId()}").touch()
        yield from batches

    return rows.mapInArrow(note, rows.schema)


class Measured(AtPhases):
    """Counts keys column by column, yields a row for each input row, and records the number of rows of each task."""

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Count without ever holding more than one batch."""
        store, rows = stores["totals"], 0
        for batch in batches:
            rows += batch.num_rows
            for found in pc.value_counts(batch.column("key")).to_pylist():
                key = found["values"].encode()
                store.put(key, b"%d" % (int(store.get(key) or b"0") + found["counts"]))
            yield batch.select(["key", "payload"])
        (self.directory / f"rows-{context.task}").write_text(str(rows))

    def at(self, phase: Phase, subject: str) -> None:
        """Record the peak memory of an attempt after its commit is prepared."""
        if phase is Phase.PREPARED:
            (self.directory / f"peak-{os.getpid()}").write_text(str(peak_bytes()))


def peak_bytes() -> int:
    """Return the peak memory of this process (Linux and macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Summing:
    """An output that sums rows and bytes on the executors, and records the peak memory of driver and workers."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def __call__(self, rows: DataFrame, sequence: int) -> None:
        """Write one file per sequence."""
        directory = self.directory

        def peaks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from batches
            (directory / f"peak-{os.getpid()}").write_text(str(peak_bytes()))

        # Spark reuses the workers that have fetched output rows
        rows.sparkSession.range(0, 16, 1, 16).mapInArrow(peaks, "id bigint").collect()
        found = rows.selectExpr("count(*) as rows", "count_if(key = 'hot') as hot", "sum(length(payload)) as bytes")
        self.directory.joinpath(f"output-{sequence}").write_text(json.dumps([*found.collect()[0], peak_bytes()]))


def kill_driver() -> None:
    """Kill a cluster's driver and everything that it started. The caller is the driver itself or a local worker."""
    here = psutil.Process()
    (driver,) = (one for one in [here, *here.parents()] if "tests.spark.cluster_job" in one.cmdline())
    for process in [driver, *driver.children(recursive=True)]:
        if process.pid != os.getpid():
            process.send_signal(signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_driver_in(phase: str) -> None:
    """Kill this driver when it reaches a phase for the second time."""
    seen: list[str] = []

    def at(announced: Phase, subject: str) -> None:
        if announced == phase:
            seen.append(subject)
            if len(seen) == 2:
                kill_driver()

    add_observer(at)


class DeltaTable:
    """An output that runs a page's function. If asked, it dies inside or right after its second call."""

    def __init__(self, program: str, table: str, death: str = "") -> None:
        names: dict[str, Any] = {}
        exec(program, names)
        names["TABLE"] = table
        self.write = names["deliver"]
        self.death = death
        self.calls = 0

    def __call__(self, rows: DataFrame, sequence: int) -> None:
        """Deliver the rows."""
        self.calls += 1
        dies = self.calls == 2
        if dies and self.death == "inside":
            rows = rows.mapInArrow(_die, rows.schema)
        self.write(rows, sequence)
        if dies and self.death == "after":
            kill_driver()


def _die(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch
        kill_driver()
