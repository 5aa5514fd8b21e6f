"""What a job has committed while its new stores were built, brought into them. Each function runs in another process.

1. :func:`read_changes` reads the changes between two states of an old store from a backend, and writes them to a file;
   if no backend has them, :func:`find_changes` compares the two states, range by range of keys
2. :func:`apply_changes` applies the changes of one new task to a copy of its store
3. :func:`extend_changelog` sends them to its partition of the new changelog

The files are change segments (:mod:`statemgr.model.segment`). Memory is bounded by a few batches of items.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path

from statemgr.backends.changelog.integrity import ends_with
from statemgr.errors import CorruptError, CorruptFile, MissingError
from statemgr.ids import task_name
from statemgr.local import cloned, durable, open_store
from statemgr.model.checkpoint import ChangelogMarker, Checkpoint
from statemgr.model.commit import Change
from statemgr.model.content import Content, columns, of_batch
from statemgr.model.keys.partitioners import Hashes
from statemgr.model.segment import read_segment, write_segment
from statemgr.operations.rescale.changelog import fenced_partition
from statemgr.operations.rescale.work import Spread, batches, check_place, directory_size
from statemgr.os_errors import disk_errors
from statemgr.ports import CommittedDirectory, LocalStore, Moment, TopicInfo
from statemgr.services import Services

log = logging.getLogger(__name__)
_BATCH = 2048
Pair = tuple[bytes, bytes]


@dataclass(frozen=True)
class Found:
    """A file of changes, and their number. A key may occur several times; the last change of it counts."""

    file: str
    changes: int


@dataclass(frozen=True)
class Applied:
    """The number of changes of a new task; by how much they change its content; and the bytes of its store."""

    changes: int
    content: Content
    size: int


def read_changes(
    services: Services, spread: Spread, task: int, before: Checkpoint, after: Checkpoint, as_of: Moment, into: Path
) -> Found | None:
    """The changes between two states of an old task's store, from the first backend that has them; None if none has.

    Args:
        as_of: a moment at which ``before`` was the newest checkpoint.

    Raises: InvalidError for a key that another task should have; RetryableError, DiskFull.
    """
    identity = services.identity(task_name(task), spread.store)
    for factory in services.config.stores[spread.store].restore_factories:
        older, newer = before.marker(factory, spread.store), after.marker(factory, spread.store)
        if older is None or newer is None:
            continue
        try:
            changes = services.restore_manager(factory).changes_between(identity, older, newer, as_of)
            if changes is not None:
                return _written(services, spread, task, changes, into)
        except (MissingError, CorruptError) as error:
            log.warning("%s: the changes cannot be read from %s: %s", identity, factory, error)
        into.unlink(missing_ok=True)
    return None


def find_changes(
    services: Services,
    spread: Spread,
    task: int,
    before: Path,
    after: Path,
    bounds: tuple[bytes | None, bytes | None],
    into: Path,
) -> Found:
    """The changes between two states of an old task's store, in a range of keys, by reading both.

    Raises: InvalidError for a key that another task should have; CorruptError, DiskFull.
    """
    two = (batches(services, spread.store, directory, *bounds) for directory in (before, after))
    return _written(services, spread, task, _differing(*two), into)


def _written(services: Services, spread: Spread, task: int, found: Iterable[Sequence[Change]], into: Path) -> Found:
    hashes = spread.hashes(services)
    count = 0

    def changes() -> Iterator[Change]:
        nonlocal count
        for some in found:
            mine: list[Change] = []
            for change, number in zip(some, hashes([key for key, _ in some]), strict=True):
                if number % spread.before == task:
                    mine.append(change)
                elif change[1] is not None:
                    check_place(spread, task, spread.before, [change[0]], [number])
            count += len(mine)  # the task does not have what else was deleted
            yield from mine

    with disk_errors(into), durable.create(into) as sink:
        write_segment(changes(), sink)
    return Found(str(into), count)


def _differing(before: Iterator[list[Pair]], after: Iterator[list[Pair]]) -> Iterator[list[Change]]:
    """The changes from one sequence of items to another; both are in key order, in lists."""
    left, right = next(before, []), next(after, [])
    key_of = itemgetter(0)
    while left or right:
        if left == right:
            left, right = next(before, []), next(after, [])
            continue
        # both lists up to the key that both have reached
        last = min(some[-1][0] for some in (left, right) if some)
        ends = [bisect_right(some, last, key=key_of) for some in (left, right)]
        if not left or not right:
            ends = [len(left), len(right)]
        old, new = dict(left[: ends[0]]), dict(right[: ends[1]])
        found: list[Change] = [(key, value) for key, value in new.items() if old.get(key) != value]
        found += [(key, None) for key in old.keys() - new.keys()]
        yield found
        left, right = left[ends[0] :] or next(before, []), right[ends[1] :] or next(after, [])


def apply_changes(
    services: Services, spread: Spread, task: int, files: Sequence[str], before: Path, after: Path
) -> Applied:
    """Make a copy of a new task's store that has the task's changes, too.

    The content hash is a sum, so each change takes the old value's hash from it and adds the new one's.

    Raises: CorruptFile if a key does not have its newest value afterwards; DiskFull.
    """
    config = services.config.stores[spread.store]
    there = {path.name: (path.stat().st_size, b"") for path in before.iterdir()}
    if not cloned(CommittedDirectory("", before, there), after):
        raise CorruptFile("a new store has vanished", hint="run it again", path=before)
    hashes = spread.hashes(services)
    store = open_store(config.type, after, config.rocksdb, briefly=True)
    count, content = 0, Content()
    try:
        for batch in _of_task(spread, task, files, hashes):
            newest = dict(batch)
            content -= _content_of(store, list(newest))
            store.write(newest.items())
            if store.get_many(list(newest)) != list(newest.values()):
                raise CorruptFile("a new store does not have what was written to it", hint="run it again", path=after)
            content += of_batch(*columns([(key, value) for key, value in newest.items() if value is not None]))
            count += len(batch)
        store.flush()
    finally:
        store.close()
    return Applied(count, content, directory_size(after))


def _content_of(store: LocalStore, keys: Sequence[bytes]) -> Content:
    """The content of those of the keys that a store has."""
    found = zip(keys, store.get_many(keys), strict=True)
    return of_batch(*columns([(key, value) for key, value in found if value is not None]))


def extend_changelog(
    services: Services,
    spread: Spread,
    info: TopicInfo,
    task: int,
    files: Sequence[str],
    marker: ChangelogMarker,
    directory: Path,
) -> ChangelogMarker:
    """Send a new task's changes to its changelog, which has the state before them up to ``marker``.

    Where it has more than that, an earlier try has died: the whole store is written again. Raises: as
    :func:`statemgr.operations.rescale.changelog.fill_changelog`.
    """
    with fenced_partition(services, spread.store, info, task) as partition:
        _, end = services.changelog().bounds(info.name, task)
        if marker.topic_id != info.topic_id or not ends_with(services.changelog(), marker, end):
            return partition.fill(directory)
        return partition.send(marker, _of_task(spread, task, files, spread.hashes(services)))


def _of_task(spread: Spread, task: int, files: Sequence[str], hashes: Hashes) -> Iterator[list[Change]]:
    """The changes of one new task, in order and in batches."""
    for file in files:
        with disk_errors(Path(file)), durable.open_file(Path(file)) as source:
            changes = read_segment(source)
            while batch := list(islice(changes, _BATCH)):
                numbers = hashes([key for key, _ in batch])
                mine = [change for change, number in zip(batch, numbers, strict=True) if number % spread.after == task]
                if mine:
                    yield mine
