"""The parts of a rescale that run in processes of their own. Each is one call, and can be repeated.

1. :func:`restore_source` restores one old store into a directory; :func:`restore_stored` restores a new one that
   another machine has made
2. :func:`fitting` finds the partitioner that put the first keys where they are
3. :func:`split_range` reads a range of keys of that store, checks that each key is in its task, adds up the content
   hash, and writes the items of each new task to sorted tables
4. :func:`make_store` makes the new store of the tables of all old tasks
5. :func:`check_range` reads a range of keys of the new store again, checks that each key is in its task, and adds up
   the content hash

Memory is bounded by a batch of items, and one open table for each new task.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import TypeVar

from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import CorruptFile, InvalidError
from statemgr.flows.opening.restore import restore_store
from statemgr.ids import task_name
from statemgr.local import (
    SortedTables,
    bulk_writer,
    cloned,
    empty_directory,
    remove,
    scan_in_batches,
    snapshot_batches,
    store_of_tables,
)
from statemgr.local.directories import StoreDirectories
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.commit import PreparedCommit
from statemgr.model.content import Content, columns, of_batch
from statemgr.model.hashing import content_hash
from statemgr.model.jobs.permissions import Permissions
from statemgr.model.keys.partitioners import Hashes, candidates, hash_of
from statemgr.model.plan import StorePlan, plan_stores
from statemgr.ports import CommittedDirectory, no_progress
from statemgr.services import Services

T = TypeVar("T")
#: Items that are read, hashed and routed together: few enough for the processor's caches.
_BATCH = 2048
#: How often a copy of a new store is tried.
_COPIES = 10
#: Keys that are looked at to find the partitioner.
_LOOKED_AT = 1000
#: New tasks whose tables are open at a time. For more new tasks, the old store is read several times.
_MOST_OPEN = 200


@dataclass(frozen=True)
class Spread:
    """How the keys of a store are spread over tasks. ``partitioner``: the name of one of the candidates. ``grouping``:
    the types of the grouping columns, if a Spark processor wrote the stores."""

    store: str
    recorded: str
    partitioner: str
    before: int
    after: int
    grouping: str | None = None

    def hashes(self, services: Services) -> Hashes:
        """The partitioner: keys → their hashes, whose remainder by a number of tasks is the key's task."""
        serde = services.config.stores[self.store].key_serde
        return candidates(self.recorded, serde, self.partitioner, self.grouping)[self.partitioner]


@dataclass(frozen=True)
class Split:
    """What one range of keys had: its content, and new task → its tables in key order."""

    content: Content
    tables: Mapping[int, Sequence[str]]


def restore_source(
    services: Services, record: CheckpointRecord, checkpoint: Checkpoint, store: str, directory: Path
) -> tuple[Path, int]:
    """Restore one store at a retained checkpoint. What an earlier try left in the directory is used.

    Returns: the finished store's directory, and its bytes. Raises: as
    :func:`statemgr.flows.opening.restore.restore_store`.
    """
    config, task = services.config, record.task
    place = record.checkpoints.index(checkpoint)
    (plan,) = plan_stores(
        checkpoint,
        {store: config.stores[store].restore_factories},
        durable={store: True},
        permissions=Permissions(allow_removed_stores=True),
        newer=record.checkpoints[:place][::-1],
        older=record.checkpoints[place + 1 :],
        job=config.job_name,
        task=task,
    )
    return _restored(services, task, plan, directory)


def restore_stored(services: Services, store: str, commit: PreparedCommit, directory: Path) -> Path:
    """Restore one new store from the backends that have it. What an earlier try left in the directory is used.

    Returns: the finished store's directory. Raises: as :func:`statemgr.flows.opening.restore.restore_store`.
    """
    made = commit.stores[store]
    # blobs first: a changelog is read record by record
    candidates = tuple(sorted(made.markers.items(), key=lambda item: item[0] == KAFKA_CHANGELOG))
    path, _ = _restored(services, commit.task, StorePlan(store, made.state_id, candidates, {}), directory)
    return path


def _restored(services: Services, task: str, plan: StorePlan, directory: Path) -> tuple[Path, int]:
    directories = StoreDirectories(directory, services.clock, services.ids)
    try:
        alone = replace(services, directories=lambda _task, _store: directories)
        committed, _ = restore_store(alone, task, plan, no_progress)
        assert committed is not None
        return committed.path, sum(size for size, _ in committed.files.values())
    finally:
        directories.close()


def directory_size(directory: Path) -> int:
    """Bytes on disk of a finished store. Raises: OSError."""
    return sum(file.stat().st_size for file in directory.iterdir())


def batches(
    services: Services, store: str, directory: Path, start: bytes | None, end: bytes | None
) -> Generator[list[tuple[bytes, bytes]]]:
    """The items of a finished store in key order. Raises: CorruptError."""
    config = services.config.stores[store]
    return snapshot_batches(config.type, directory, config.rocksdb, start, end, _BATCH)


@contextmanager
def read_copy(services: Services, directory: Path) -> Iterator[Path]:
    """A copy of a finished store, by hard links, while the block runs.

    rocksdict writes a small file into the directory of a store that it opens, also for reading, and another thread may
    upload that directory. The upload may rename a file while this lists the directory, so this tries several times.
    Raises: DiskFull, CorruptFile.
    """
    copy = directory.with_name(f"{directory.name}-read-{services.ids.token()[:16]}")
    for _ in range(_COPIES):
        files = {path.name: (0, b"") for path in directory.iterdir()} if directory.is_dir() else {}
        if files and cloned(CommittedDirectory("", directory, files), copy):
            break
    else:
        raise CorruptFile("a new store has vanished", hint="run it again", path=directory)
    try:
        yield copy
    finally:
        remove(copy)


def fitting(
    services: Services, store: str, directory: Path, recorded: str, names: Sequence[str], task: int, tasks: int
) -> dict[str, str]:
    """Which of several partitioners put the first keys of a store into its task; all of them if it is empty.

    Returns: name → a text that is the same for those with the same hash of each of these keys.
    """
    with closing(batches(services, store, directory, None, None)) as found:
        keys = [key for key, _ in next(found, [])][:_LOOKED_AT]
    fit: dict[str, str] = {}
    for name in names:
        with suppress(InvalidError):
            numbers = candidates(recorded, services.config.stores[store].key_serde, name)[name](keys)
            if all(number % tasks == task for number in numbers):
                fit[name] = content_hash(repr(list(numbers)).encode()).hex() if keys else hash_of(name)
    return fit


def check_keys(
    services: Services, spread: Spread, task: int, directory: Path, start: bytes | None, end: bytes | None
) -> int:
    """The number of keys in a range of an old task's store. Raises: InvalidError for a key that another task should
    have; CorruptError."""
    hashes, count = spread.hashes(services), 0
    for batch in batches(services, spread.store, directory, start, end):
        keys, _ = columns(batch)
        check_place(spread, task, spread.before, keys, hashes(keys))
        count += len(keys)
    return count


def split_range(
    services: Services,
    spread: Spread,
    task: int,
    directory: Path,
    bounds: tuple[bytes | None, bytes | None],
    into: Path,
) -> Split:
    """Split a range of keys of an old task's store. ``into`` is emptied first.

    Raises: InvalidError for a key that another task should have; CorruptError, DiskFull.
    """
    config = services.config.stores[spread.store]
    hashes = spread.hashes(services)
    empty_directory(into)
    content = Content()
    tables: dict[int, Sequence[str]] = {}
    for first in range(0, spread.after, _MOST_OPEN):
        writing = SortedTables(into, config.rocksdb if config.type == "rocksdb" else {}, spread.after)
        everything = spread.after <= _MOST_OPEN
        for batch in batches(services, spread.store, directory, *bounds):
            keys, values = columns(batch)
            found = hashes(keys)
            if not first:
                check_place(spread, task, spread.before, keys, found)
                content += of_batch(keys, values)
            numbers = [number % spread.after for number in found]
            if not everything:
                mine = [first <= number < first + _MOST_OPEN for number in numbers]
                writing.write(_only(mine, numbers), _only(mine, keys), _only(mine, values))
                continue
            writing.write(numbers, keys, values)
        writing.finish()
        tables |= {number: [str(path) for path in paths] for number, paths in writing.files.items()}
    return Split(content, tables)


def _only(mine: Sequence[bool], items: Sequence[T]) -> list[T]:
    return list(compress(items, mine))


def check_place(spread: Spread, task: int, tasks: int, keys: Sequence[bytes], found: Sequence[int]) -> None:
    """Check that keys with these hashes belong to an old task. Raises: InvalidError."""
    if {number % tasks for number in found} <= {task}:
        return
    key, number = next((key, number % tasks) for key, number in zip(keys, found, strict=True) if number % tasks != task)
    raise InvalidError(
        f"{task_name(task)} has the key {key[:40]!r}, and {spread.partitioner} puts it into {task_name(number)}",
        hint="a job can be rescaled if its state has the keys of its input, in the task that the partitioner chooses; "
        "start a new job (another job.id) otherwise",
        store=spread.store,
    )


def make_store(services: Services, store: str, tables: Sequence[str], directory: Path) -> int:
    """Make a new store of tables, which stay. ``directory`` is emptied first.

    Returns: its bytes. Raises: CorruptError, DiskFull.
    """
    config = services.config.stores[store]
    empty_directory(directory)
    if config.type == "rocksdb":
        store_of_tables(directory, config.rocksdb, map(Path, tables))
    else:
        copy = directory.with_name(f"{directory.name}.tables")
        empty_directory(copy)
        store_of_tables(copy, {}, map(Path, tables))
        with bulk_writer(config.type, directory, config.rocksdb) as writer:
            for batch in scan_in_batches(copy, {}, None, None, _BATCH):
                writer.write(batch)
        remove(copy)
    return directory_size(directory)


def check_range(
    services: Services, spread: Spread, task: int, directory: Path, start: bytes | None, end: bytes | None
) -> Content:
    """The content of a range of keys of a new store. Raises: CorruptFile for a key of another task."""
    hashes = spread.hashes(services)
    content = Content()
    with read_copy(services, directory) as copy:
        for batch in batches(services, spread.store, copy, start, end):
            keys, values = columns(batch)
            if not {number % spread.after for number in hashes(keys)} <= {task}:
                raise CorruptFile("a new store has a key of another task", hint="run it again", path=directory)
            content += of_batch(keys, values)
    return content
