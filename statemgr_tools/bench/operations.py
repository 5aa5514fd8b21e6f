"""Measurements that run in their own processes: restores, backups, and plain code that moves the same bytes.

Each function takes and returns JSON. Times are seconds of the operation, without the start of the process.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from statemgr.config import JobConfig
from statemgr.engine import Attempt, Epoch, PreparedCommit, checkpoint_from_bytes, checkpoint_to_bytes, open_attempt
from statemgr.engine.host import attempt_host
from statemgr.ids import CheckpointId
from statemgr.local.durable import hash_file
from statemgr.model.checkpoint import BlobMarker, BlobRef, Checkpoint, Layout
from statemgr.ports import FinishedDirectory, PartialState, RestoreRequest, StoreSnapshot, list_blobs, no_progress
from statemgr.services import Services
from statemgr.stores.open_store import NO_CHANGES
from statemgr.wiring import open_services
from statemgr_tools.bench import records
from statemgr_tools.bench.measure import percentile
from statemgr_tools.bench.memory import let_go
from statemgr_tools.bench.seed import STORE, TASK

_THREADS = 8
#: Bytes of a plain GET.
_CHUNK = 16 * 1024
#: Seconds of updates of a whole store.
_AFTER_S = 5.0


def open_at(config: JobConfig, checkpoint: Checkpoint | None) -> Attempt:
    """Open task 0's store ``s`` at a checkpoint, without Kafka."""
    return open_attempt(config, TASK, checkpoint, Epoch(1, Layout(1, 1, "kafka-partition"), {}))


def backup(config: dict[str, Any], checkpoint: str, held: str | None = None) -> dict[str, Any]:
    """Open a store and prepare a commit of it, which uploads everything that the blob store lacks."""
    base, parsed = checkpoint_from_bytes(bytes.fromhex(checkpoint)), JobConfig.from_mapping(config)
    _connect(parsed)
    with open_at(parsed, base) as attempt:
        let_go(held)
        start = time.perf_counter()
        prepared = attempt.prepare({})
        took = time.perf_counter() - start
    return {"seconds": took, "checkpoint": checkpoint_to_bytes(_following(base, prepared)).hex()}


def _following(base: Checkpoint, prepared: PreparedCommit) -> Checkpoint:
    """Return the checkpoint that the publish of a commit would make."""
    store = prepared.stores[STORE]
    return replace(
        base,
        checkpoint_id=CheckpointId(base.checkpoint_id.millis + 1, 0),
        sequence=base.sequence + 1,
        stores={STORE: store.state_id},
        state_checkpoint_markers={factory: {STORE: marker} for factory, marker in store.markers.items()},
    )


def commit_segments(config: dict[str, Any], checkpoint: str, of: int, count: int, commits: int) -> dict[str, Any]:
    """Commit ``count`` of the ``of`` records several times, on top of a checkpoint's snapshot."""
    parsed, base = JobConfig.from_mapping(config), checkpoint_from_bytes(bytes.fromhex(checkpoint))
    for number in range(commits):
        with open_at(parsed, base) as attempt:
            attempt.store(STORE).put_many(records.updates(count, of=of, seed=number + 1000))
            base = _following(base, attempt.prepare({}))
    return {"checkpoint": checkpoint_to_bytes(base).hex()}


def restore(config: dict[str, Any], checkpoint: str, held: str | None = None) -> dict[str, Any]:
    """Open a store at a checkpoint: when this returns, it is restored, verified and ready for its first read."""
    parsed, published = JobConfig.from_mapping(config), checkpoint_from_bytes(bytes.fromhex(checkpoint))
    _connect(parsed)
    let_go(held)
    start = time.perf_counter()
    with open_at(parsed, published) as attempt:
        next(iter(attempt.store(STORE).range()), None)
        took = time.perf_counter() - start
        (restored,) = attempt.restored
    return {
        "seconds": took,
        "factory": restored.factory,
        "bytes_fetched": restored.bytes_fetched,
        "bytes_reused": restored.bytes_reused,
    }


@contextmanager
def _opened_by_need(config: dict[str, Any], checkpoint: str) -> Iterator[tuple[Services, Callable[[], PartialState]]]:
    """A process that has connected. Yields a function that opens the store before all of it is here."""
    parsed, published = JobConfig.from_mapping(config), checkpoint_from_bytes(bytes.fromhex(checkpoint))
    _connect(parsed)
    services = attempt_host(parsed).services
    marker = published.marker("blob-store", STORE)
    assert marker is not None
    opened: list[PartialState] = []

    def opening() -> PartialState:
        staging = services.directories(TASK, STORE).staging()
        request = RestoreRequest(services.identity(TASK, STORE), marker, staging, (), no_progress)
        state = services.restore_manager("blob-store").open_by_need(request, 1, owned=True)
        assert state is not None
        opened.append(state)
        return state

    yield services, opening
    for state in opened:
        state.store.close()


def first_answer(
    config: dict[str, Any], checkpoint: str, of: int, gets: int, seed: int, held: str | None = None
) -> dict[str, Any]:
    """Open a store at a checkpoint before all of it is here, read random keys of ``of`` records, and fetch the rest.

    Returns: ``seconds`` to the first value; the median and the 99th percentile of more ``gets``; the median of plain
    GETs of as much; and seconds from the beginning until everything is here, without the gets, while something reads
    random keys.
    """
    numbers = random.Random(seed).sample(range(of), gets + 1)
    with _opened_by_need(config, checkpoint) as (services, opening):
        let_go(held)
        start = time.perf_counter()
        state = opening()
        assert state.store.get(records.key(numbers[0])) is not None
        first = time.perf_counter() - start
        largest = max(list_blobs(services.blobs(), f"{services.config.job_name}/"), key=lambda blob: blob.size)
        found, plain = [], []
        for number in numbers[1:]:
            begun = time.perf_counter()
            assert state.store.get(records.key(number)) is not None
            found.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            services.transfer().get_range(BlobRef(largest.blob_id, largest.size, b""), 0, _CHUNK)
            plain.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        with _reading(state, of, seed):
            state.fetch_rest(lambda: None)
            complete = first + time.perf_counter() - begun
    late = percentile(found, 0.99)
    return {"seconds": first, "get": median(found), "late": late, "plain": median(plain), "complete": complete}


@contextmanager
def _reading(state: PartialState, of: int, seed: int) -> Iterator[None]:
    """Read random keys on another thread, one after the other."""
    over, source = threading.Event(), random.Random(seed)

    def read() -> None:
        while not over.is_set():
            assert state.store.get(records.key(source.randrange(of))) is not None

    reader = threading.Thread(target=read, name="bench-reader")
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()


def first_second(
    config: dict[str, Any], checkpoint: str, of: int, seed: int, whole: bool, held: str | None = None
) -> dict[str, Any]:
    """Read and write random existing keys from the first second on, and for some seconds after everything is here.

    Returns: ``rates``, updates in each second until everything is here, and ``after``, updates per second then. With
    ``whole``, the store is whole before the first update.
    """
    source = random.Random(seed)

    def updates(seconds: float) -> int:
        until, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < until:
            name = records.key(source.randrange(of))
            value = state.store.get(name)
            assert value is not None
            state.store.write([(name, value[::-1])])
            count += 1
        return count

    with _opened_by_need(config, checkpoint) as (_, opening):
        let_go(held)
        state, rates = opening(), list[int]()
        rest = threading.Thread(target=state.fetch_rest, args=(lambda: None,), name="bench-rest")
        rest.start()
        if whole:
            rest.join()
        while rest.is_alive():
            rates.append(updates(1.0))
        after = updates(_AFTER_S) / _AFTER_S
    return {"rates": rates, "after": after}


def _connect(config: JobConfig) -> None:
    """Make the client of the process first, as plain code does, so that imports of modules are not measured."""
    services = attempt_host(config).services
    services.restore_manager("blob-store")
    services.blobs().administration.list("no-such-job/")


def copy(paths: list[str], target: str, held: str) -> dict[str, Any]:
    """Copy files in parallel with eight threads. Like a restore, this syncs nothing."""
    Path(target).mkdir()

    def one(path: str) -> None:
        shutil.copyfile(path, Path(target, Path(path).name))

    let_go(held)
    return {"seconds": in_parallel(one, paths)}


def in_parallel(action: Callable[[str], None], items: list[str]) -> float:
    """Call a function for many items with eight threads. Returns: the seconds."""
    start = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(action, item) for item in items]:
            done.result()
    return time.perf_counter() - start


def hash_files(directory: str) -> dict[str, Any]:
    """Read and hash every file of a directory with eight threads."""

    def one(path: str) -> None:
        hash_file(Path(path))

    return {"seconds": in_parallel(one, [str(path) for path in Path(directory).iterdir() if path.is_file()])}


def commit(config: dict[str, Any], checkpoint: str, of: int, count: int) -> dict[str, Any]:
    """Open a store at a checkpoint, change ``count`` of its ``of`` records, and prepare the commit."""
    with open_at(JobConfig.from_mapping(config), checkpoint_from_bytes(bytes.fromhex(checkpoint))) as attempt:
        attempt.store(STORE).put_many(records.updates(count, of=of, seed=1))
        start = time.perf_counter()
        attempt.prepare({})
        return {"seconds": time.perf_counter() - start}


def backup_file(config: dict[str, Any], path: str) -> dict[str, Any]:
    """Back up a directory that holds one file, of any size."""
    services = open_services(JobConfig.from_mapping(config))
    file = Path(path)
    snapshot = StoreSnapshot(
        services.identity(TASK, STORE), "one-file", services.ids.attempt_id(),
        FinishedDirectory(file.parent, {file.name: (file.stat().st_size, None)}), NO_CHANGES, None,
    )  # fmt: skip
    start = time.perf_counter()
    prepared = services.backup_manager("blob-store").prepare(snapshot, None, portable=False)
    took = time.perf_counter() - start
    services.close()
    assert isinstance(prepared.marker, BlobMarker)
    assert prepared.marker.inline is not None
    return {"seconds": took, "marker": prepared.marker.inline.hex()}


def restore_file(config: dict[str, Any], marker: str, target: str) -> dict[str, Any]:
    """Restore the backup of :func:`backup_file`."""
    services = open_services(JobConfig.from_mapping(config))
    identity, named = services.identity(TASK, STORE), BlobMarker(inline=bytes.fromhex(marker))
    request = RestoreRequest(identity, named, Path(target), (), lambda what, done, total: None)
    start = time.perf_counter()
    restored = services.restore_manager("blob-store").restore(request)
    took = time.perf_counter() - start
    services.close()
    return {"seconds": took, "bytes_fetched": restored.bytes_fetched}
