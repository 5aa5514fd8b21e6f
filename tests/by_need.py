"""States that are read by need, for tests without a broker."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from statemgr import JobConfig
from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.blobs.partial_tables import PartialTables
from statemgr.local.rocksdb.partial import PartialStore
from statemgr.model.checkpoint import BlobRef, Marker
from statemgr.model.snapshot import SnapshotIndex
from statemgr.ports import PartialState, RestoreRequest, no_progress
from statemgr.services import Services
from statemgr.transfer.downloads import Downloads
from statemgr.wiring import open_services
from tests.jobs import with_changes
from tests.segment_tasks import FACTORY, STORE, SegmentTask

ROCKSDB: dict[str, Any] = {
    f"stores__{STORE}__type": "rocksdb",
    f"stores__{STORE}__rocksdb__target__file__size__bytes": 256 * 1024,
    f"stores__{STORE}__rocksdb__level0__compaction__trigger": 1000,
    f"stores__{STORE}__rocksdb__compression": "none",
    # a cache of its own for each store: otherwise a block that another test has read would hide a hole
    f"stores__{STORE}__rocksdb__block__cache__size__bytes": 1024 * 1024,
    "blob__store__retry__policy__max__retries": 0,
}
#: A job on servers in memory whose small stores are read by need.
SMALL_STORES: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "task.backup.factories": ["blob-store"],
    "task.restore.by.need.bytes": 1,
    "stores.totals.value.serde": "bytes",
    "stores.totals.rocksdb.compression": "none",
    "stores.totals.rocksdb.target.file.size.bytes": 64 * 1024,
    # a cache of its own for each store: otherwise a block that another one has read would hide a hole
    "stores.totals.rocksdb.block.cache.size.bytes": 1024 * 1024,
    "blob.store.retry.policy.max.retries": 0,
    "blob.store.part.size": 128 * 1024,
}
State = dict[bytes, bytes]


class Gate:
    """Holds back the rest of each store until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        fetch_rest = PartialTables.fetch_rest

        def held_back(tables: PartialTables, check: Callable[[], None]) -> None:
            while not self.open.wait(0.01):
                check()
            fetch_rest(tables, check)

        monkeypatch.setattr(PartialTables, "fetch_rest", held_back)


def fetched_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that each read by need asks the blob store for from now on."""
    sizes: list[int] = []
    get_range = Downloads.get_range

    def counted(self: Downloads, ref: BlobRef, offset: int, size: int) -> memoryview:
        sizes.append(size)
        return get_range(self, ref, offset, size)

    monkeypatch.setattr(Downloads, "get_range", counted)
    return sizes


def key(number: int) -> bytes:
    """A key; those of even numbers are in the snapshot."""
    return b"key-%06d" % number


def large_state(seed: int, count: int = 12_000) -> State:
    """Values that nothing can compress."""
    source = random.Random(seed)
    return {key(2 * number): source.randbytes(60 + number % 50) for number in range(count)}


def publish(config: JobConfig, state: State, tables: int = 3) -> tuple[JobConfig, Marker, State]:
    """Commit a state and two segments. Returns: the job, the marker, and the state after them."""
    services = open_services(config)
    task = SegmentTask(services, 0)
    for start in range(0, len(state), len(state) // tables):
        task.write_table(dict(list(state.items())[start : start + len(state) // tables]))
    task.commit()
    more: dict[bytes, bytes | None] = {key(number): b"new" for number in range(0, 3_000, 2)}
    more |= {key(number): b"odd" for number in range(1, 2_001, 2)}
    few: dict[bytes, bytes | None] = {key(10_000): None, key(4): b"newest", key(99_999): b"last"}
    checkpoint = task.commit(more)
    checkpoint = task.commit(few)
    task.close()
    services.close()
    changed = {**state, b"key": b"0", **more, **few}
    marker = checkpoint.marker(FACTORY, STORE)
    assert marker is not None
    return config, marker, {name: value for name, value in changed.items() if value is not None}


@contextmanager
def partial_state(
    config: JobConfig, marker: Marker, here: Path, leftovers: Sequence[Path] = ()
) -> Iterator[PartialState]:
    """The state, on a machine that has nothing of it but what earlier tries left. Its files are in ``here/parts``."""
    services = open_services(with_changes(config, state__dir=str(here / "state")))
    try:
        identity = services.identity("Partition 0", STORE)
        request = RestoreRequest(identity, marker, here / "parts", (), no_progress, leftovers=leftovers)
        state = services.restore_manager(FACTORY).open_by_need(request, 1)
        assert state is not None
        try:
            yield state
        finally:
            state.store.close()
    finally:
        services.close()


@contextmanager
def opened(config: JobConfig, marker: Marker, here: Path) -> Iterator[PartialStore]:
    """The store, on a machine that has nothing of it."""
    with partial_state(config, marker, here) as state:
        assert isinstance(state.store, PartialStore)
        yield state.store


def index_of(services: Services, marker: Marker) -> SnapshotIndex:
    """The index of the marker's snapshot."""
    catalogue = Catalogue(services.transfer)
    identity = services.identity("Partition 0", STORE)
    return catalogue.index(identity, catalogue.chain(identity, marker).snapshot.index)


def check(store: PartialStore, state: Mapping[bytes, bytes]) -> None:
    """Compare all keys, absent ones, and ranges."""
    wanted = [key(number) for number in range(0, 24_010, 7)]
    random.Random(3).shuffle(wanted)
    assert {name: store.get(name) for name in wanted[:200]} == {name: state.get(name) for name in wanted[:200]}
    assert store.get_many(wanted) == [state.get(name) for name in wanted]
    first, last = key(5_000), key(6_000)
    assert dict(store.scan(first, last)) == {name: value for name, value in state.items() if first <= name < last}
    assert list(store.scan(None, None)) == sorted(state.items())
