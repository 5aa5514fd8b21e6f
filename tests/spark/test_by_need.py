"""Batches begin while most of the state is still in the blob store, and workers die meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from spark_integration import StateContext
from statemgr import Store
from statemgr.backends.blobs.partial_tables import PartialTables
from tests.jobs import SEGMENTS
from tests.spark.conftest import OUTPUT, Pipeline, count
from tests.spark.faults import first

_GROWN, _SIZE = 30_000, 100


def grow(
    batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
) -> Iterator[pa.RecordBatch]:
    """Count, and store some megabytes of bytes that cannot be compressed."""
    source = Random(1)
    stores["totals"].put_many([(b"!%06d" % number, source.randbytes(_SIZE)) for number in range(_GROWN)])
    yield from count(batches, stores, context)


class KilledDuringTheFill:
    """A process function of which a worker dies in the first batch. No worker fetches the rest before the file ``go``
    exists, and the batch ``last`` makes it."""

    def __init__(self, directory: Path, last: int) -> None:
        self.directory = directory
        self.last = last

    def __setstate__(self, found: dict[str, object]) -> None:
        """Runs in a worker before it opens a store."""
        self.__dict__ |= found
        directory, fetch_rest = self.directory, PartialTables.fetch_rest
        if getattr(fetch_rest, "is_held", False):
            return

        def held(tables: PartialTables, check: Callable[[], None]) -> None:
            while not (directory / "go").exists():
                check()
                time.sleep(0.01)
            fetch_rest(tables, check)

        held.is_held = True  # type: ignore[attr-defined]
        setattr(PartialTables, "fetch_rest", held)  # noqa: B010

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Count, and look up one of the other keys."""
        yield from count(batches, stores, context)
        value = stores["totals"].get(b"!%06d" % (100 * context.sequence))
        assert value is not None
        assert len(value) == _SIZE
        if first(self.directory / "died"):
            os.kill(os.getpid(), signal.SIGKILL)
        if context.sequence >= self.last:
            (self.directory / "go").touch()


@pytest.mark.long
def test_a_worker_dies_while_the_state_comes(pipeline: Callable[..., Pipeline], tmp_path: Path) -> None:
    """Its machine had lost the state. The batch runs again at once, and later ones share what is here. No count
    is lost, and each batch fetches a small part of what a whole restore would."""
    job = pipeline(
        tasks=1, partitions=1, backup=("blob-store",), kind=SEGMENTS, task__restore__by__need__bytes=1,
        stores__totals__rocksdb__compression="none",
    )  # fmt: skip
    job.produce(20)
    job.run(job.query().process(grow, OUTPUT))
    shutil.rmtree(job.config.state_dir)
    job.produce(60)
    running = job.run(job.query(per_batch=20).process(KilledDuringTheFill(tmp_path, last=4), OUTPUT))

    assert (tmp_path / "died").exists()
    reports = running.recentBatches
    restored = [one for report in reports for one in report.restored]
    assert [report.sequence for report in reports] == [2, 3, 4]
    assert [report.retries for report in reports] == [1, 0, 0]
    assert [one.factory for one in restored] == ["blob-store"] * 3
    assert all(one.bytes_to_come > _GROWN * _SIZE / 2 for one in restored)
    assert all(one.bytes_fetched < one.bytes_to_come / 20 for one in restored)
    job.produce(20)
    (after,) = job.run(job.query().process(KilledDuringTheFill(tmp_path, last=4), OUTPUT)).recentBatches
    assert after.input_rows == 20
    contents = job.contents()["Partition 0"]
    assert len([name for name in contents if name.startswith(b"!0")]) == _GROWN
    counted = {name.decode(): int(value) for name, value in contents.items() if not name.startswith(b"!")}
    assert counted == job.outputs.counts() == job.produced
