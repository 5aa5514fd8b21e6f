"""Opens a large store before its state is here, as a task does, and measures that next to a whole restore.

The state of the demo is too small for that, so this makes one of random bytes, in the run's blob store, in a job of its
own that nobody publishes: its blobs expire. Writes only in a directory of its own, and needs no broker.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from statemgr import JobConfig
from statemgr.config.factories import BLOB_STORE
from statemgr.local import bulk_writer
from statemgr.model.checkpoint import Marker
from statemgr.ports import FinishedDirectory, RestoreRequest, StoreSnapshot, no_progress
from statemgr.services import Services
from statemgr.stores.open_store import NO_CHANGES
from statemgr.wiring import open_services
from statemgr_tools.demo.pipeline import STORE

_TASK, _COUNT, _VALUE_BYTES, _AT_ONCE = "Partition 0", 2_000_000, 100, 10_000


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """Seconds from the start of an opening to the value of a random key, and until everything is here and verified.

    Attributes:
        fetched: bytes that were fetched for the first value.
        bytes: what was fetched in the end.
        restore_seconds: a whole restore, to the value of the same key.
    """

    first_seconds: float
    fetched: int
    whole_seconds: float
    bytes: int
    restore_seconds: float


def first_answer(config: JobConfig, directory: Path, seed: int, progress: Callable[[str], None]) -> FirstAnswer:
    """Make the state, and measure. Raises: as ``RestoreManager.restore``."""
    own: dict[str, object] = {"job.name": f"{config.job_name}-first-answer", "state.dir": str(directory / "state")}
    source = random.Random(seed)
    try:
        with closing(open_services(JobConfig.from_mapping({**config.to_mapping(), **own}))) as services:
            progress("making a large state")
            marker = _make(services, directory / "made", source)
            progress("the first answer of a large state")
            return _measure(services, marker, b"%d" % source.randrange(_COUNT))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _make(services: Services, directory: Path, source: random.Random) -> Marker:
    with bulk_writer("rocksdb", directory, {}) as writer:
        for start in range(0, _COUNT, _AT_ONCE):
            numbers = range(start, start + _AT_ONCE)
            writer.write([(b"%d" % number, source.randbytes(_VALUE_BYTES)) for number in numbers])
    files: dict[str, tuple[int, bytes | None]] = {
        path.name: (path.stat().st_size, None) for path in directory.iterdir() if path.is_file()
    }
    snapshot = StoreSnapshot(
        services.identity(_TASK, STORE), "large", services.ids.attempt_id(), FinishedDirectory(directory, files),
        NO_CHANGES, None,
    )  # fmt: skip
    marker = services.backup_manager(BLOB_STORE).prepare(snapshot, None, portable=False).marker
    assert marker is not None
    return marker


def _measure(services: Services, marker: Marker, key: bytes) -> FirstAnswer:
    manager, now = services.restore_manager(BLOB_STORE), services.clock.elapsed

    def request() -> RestoreRequest:
        staging = services.directories(_TASK, STORE).staging()
        return RestoreRequest(services.identity(_TASK, STORE), marker, staging, (), no_progress)

    began = now()
    state = manager.open_by_need(request(), 1, owned=True)
    assert state is not None
    with closing(state.store):
        assert state.store.get(key) is not None
        first, fetched = now() - began, state.fetched
        state.fetch_rest(lambda: None)
        whole, size = now() - began, state.fetched
    began, whole_state = now(), request()
    manager.restore(whole_state)
    config = services.config.stores[STORE]
    with closing(services.open_store(config, whole_state.staging, True)) as store:
        assert store.get(key) is not None
        return FirstAnswer(first, fetched, whole, size, now() - began)
