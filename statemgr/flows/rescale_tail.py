"""What a job has committed while its new stores were built, brought into them. Each function runs in another process.

1. :func:`find_changes` compares two states of an old store, range by range of keys, and writes the changes to a file
2. :func:`apply_changes` applies the changes of one new task to a copy of its store, and reads each key again
3. :func:`extend_changelog` sends them to its partition of the new changelog

The files are change segments (:mod:`statemgr.model.segment`). Memory is bounded by a few batches of items.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path

from statemgr.backends.services import Services
from statemgr.errors import CorruptFile
from statemgr.flows.rescale_work import Spread, batches, check_place, fill_changelog, send_batches
from statemgr.local import cloned, durable, open_store
from statemgr.local.transfer_files import disk_errors
from statemgr.model.checkpoint import ChangelogMarker
from statemgr.model.commit import Change
from statemgr.model.partitioners import Hashes, candidates
from statemgr.model.segment import read_segment, write_segment
from statemgr.ports import CommittedDirectory, TopicInfo

_BATCH = 2048
Pair = tuple[bytes, bytes]


@dataclass(frozen=True)
class Found:
    """The changes of a range of keys: their file, their number, and by how many keys the range has grown."""

    file: str
    changes: int
    grown: int


def find_changes(
    services: Services,
    spread: Spread,
    task: int,
    before: Path,
    after: Path,
    bounds: tuple[bytes | None, bytes | None],
    into: Path,
) -> Found:
    """The changes between two states of an old task's store, in a range of keys.

    Raises: InvalidError for a key that another task should have; CorruptError, DiskFull.
    """
    hashes = candidates(spread.recorded, services.config.stores[spread.store].key_serde)[spread.partitioner]
    count = grown = 0

    def changes() -> Iterator[Change]:
        nonlocal count, grown
        for some in _differing(
            batches(services, spread.store, before, *bounds), batches(services, spread.store, after, *bounds)
        ):
            puts = [key for key, value in some.changes if value is not None]
            if puts:
                check_place(spread, task, spread.before, puts, hashes(puts))
            count += len(some.changes)
            grown += some.grown
            yield from some.changes

    with disk_errors(into), durable.create(into) as sink:
        write_segment(changes(), sink)
    return Found(str(into), count, grown)


@dataclass(frozen=True)
class _Some:
    changes: list[Change]
    grown: int


def _differing(before: Iterator[list[Pair]], after: Iterator[list[Pair]]) -> Iterator[_Some]:
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
        yield _Some(found, len(new) - len(old))
        left, right = left[ends[0] :] or next(before, []), right[ends[1] :] or next(after, [])


def apply_changes(
    services: Services, spread: Spread, task: int, files: Sequence[str], before: Path, after: Path
) -> tuple[int, int]:
    """Make a copy of a new task's store that has the task's changes, too.

    Returns: the number of changes, and the bytes of the store. Raises: CorruptFile if a key does not have its newest
    value afterwards; DiskFull.
    """
    config = services.config.stores[spread.store]
    there = {path.name: (path.stat().st_size, b"") for path in before.iterdir()}
    if not cloned(CommittedDirectory("", before, there), after):
        raise CorruptFile("a new store has vanished", hint="run it again", path=before)
    hashes = candidates(spread.recorded, config.key_serde)[spread.partitioner]
    store = open_store(config.type, after, config.rocksdb, briefly=True)
    count = 0
    try:
        for batch in _of_task(spread, task, files, hashes):
            store.write(batch)
            count += len(batch)
        store.flush()
        for batch in _of_task(spread, task, files, hashes):
            if store.get_many([key for key, _ in batch]) != [value for _, value in batch]:
                raise CorruptFile("a new store does not have what was written to it", hint="run it again", path=after)
    finally:
        store.close()
    return count, sum(path.stat().st_size for path in after.iterdir())


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
    :func:`fill_changelog`.
    """
    _, end = services.changelog().bounds(info.name, task)
    if marker.topic_id != info.topic_id or any(services.changelog().read(info.name, task, marker.offset, end)):
        return fill_changelog(services, spread.store, info, task, directory)
    hashes = candidates(spread.recorded, services.config.stores[spread.store].key_serde)[spread.partitioner]
    sent = send_batches(services, spread.store, info, task, [_of_task(spread, task, files, hashes)])
    return marker if sent is None else ChangelogMarker(info.name, info.topic_id, task, sent)


def _of_task(spread: Spread, task: int, files: Sequence[str], hashes: Hashes) -> Iterator[list[Change]]:
    """The changes of one new task, in batches. Each key occurs once."""
    for file in files:
        with disk_errors(Path(file)), durable.open_file(Path(file)) as source:
            changes = read_segment(source)
            while batch := list(islice(changes, _BATCH)):
                numbers = hashes([key for key, _ in batch])
                mine = [change for change, number in zip(batch, numbers, strict=True) if number % spread.after == task]
                if mine:
                    yield mine
