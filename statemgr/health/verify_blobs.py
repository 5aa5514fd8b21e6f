"""Checks what the retained checkpoints of a job need: blobs, and changelogs. Reads only; fences nobody.

Steps of :func:`verify_blobs`:

1. read the checkpoint topic, and ask what the changelogs of the current checkpoints have lost; the chain and the index
   of every store in every retained checkpoint name the blobs. Several tasks are read at a time
2. ask the blob store for each blob: it must exist, have the size that was written, and have no TTL
3. on request, read all blobs or a random sample of them, and compare the hashes
4. if something is wrong, do step 1 again: a blob that no retained checkpoint needs any more is not reported, and for
   the others, all checkpoints that need them are

A commit removes the TTL of its blobs after its publish. So a TTL counts only where the checkpoint is older than
``task.commit.timeout.ms``, by the blob store's clock. Memory: one entry for each different part of a blob.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TypeVar

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.config.factories import BLOB_STORE
from statemgr.errors import CorruptBlob, CorruptError, MissingError, StatemgrError
from statemgr.flows.upkeep import lost_targets
from statemgr.ids import CheckpointId, task_index
from statemgr.model.checkpoint import BlobRef, Checkpoint, CheckpointRecord
from statemgr.model.hashing import content_hash
from statemgr.ports import Progress
from statemgr.services import Services

T = TypeVar("T")
#: Tasks that are read at a time. The catalogue remembers an index for each, whatever its size.
_PARALLELISM = 8
#: Blobs that are checked before progress is reported.
_CHUNK = 256
#: Lost changelogs that are named.
_MOST_LOST = 100


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with a blob, and the newest retained checkpoint that needs it. ``store`` is empty for bytes that
    belong to the checkpoint itself, such as the output of a micro-batch. ``others``: older checkpoints that need it.
    """

    blob_id: str
    problem: str
    task: str
    store: str
    checkpoint_id: str
    others: tuple[str, ...] = ()

    @property
    def checkpoint_ids(self) -> str:
        """All checkpoints that need it, newest first."""
        return ", ".join((self.checkpoint_id, *self.others))


@dataclass
class Verified:
    """What was checked, and what was wrong.

    Attributes:
        blobs, size: all blobs that are needed, and their bytes, as the checkpoints describe them.
        checked: the blobs that were asked for.
        read, read_size: blobs, or parts of blobs, that were read whole, and their bytes.
        damaged: blobs that are missing or are not what was written.
        expiring: blobs that still have a TTL, and will disappear with it.
        lost: changelogs that have lost what current checkpoints need; without a blob.
    """

    tasks: int = 0
    checkpoints: int = 0
    blobs: int = 0
    checked: int = 0
    size: int = 0
    read: int = 0
    read_size: int = 0
    damaged: list[Finding] = field(default_factory=list)
    expiring: list[Finding] = field(default_factory=list)
    lost: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Use:
    """The newest retained checkpoint that needs a part of a blob, and the time of the oldest one."""

    stored: int
    task: str
    store: str
    checkpoint_id: CheckpointId
    oldest_ms: int

    def finding(self, ref: BlobRef, problem: str) -> Finding:
        return Finding(ref.blob_id, problem, self.task, self.store, str(self.checkpoint_id))

    def merged(self, other: _Use) -> _Use:
        newest = other if other.checkpoint_id > self.checkpoint_id else self
        return replace(newest, oldest_ms=min(self.oldest_ms, other.oldest_ms))


@dataclass
class _Needed:
    """Every part of a blob that is needed, the indexes and chains that could not be read, and which checkpoints need
    some of the blobs."""

    uses: dict[BlobRef, _Use] = field(default_factory=dict)
    damaged: dict[str, Finding] = field(default_factory=dict)
    needed_by: dict[str, set[CheckpointId]] = field(default_factory=dict)

    def use(self, ref: BlobRef, use: _Use) -> None:
        known = self.uses.get(ref)
        self.uses[ref] = use if known is None else known.merged(use)


def verify_blobs(
    services: Services,
    read: Callable[[], Mapping[str, CheckpointRecord]],
    tasks: Sequence[str],
    sample: float,
    progress: Progress,
    *,
    only: Collection[str] | None = None,
    most: int | None = None,
) -> Verified:
    """Check the blobs of ``tasks`` (empty: of all).

    Args:
        read: reads the newest record of every task from the topic.
        sample: the share of the blobs that is also read whole: 0 reads none, 1 reads all.
        only: the names of the blobs to check; all by default.
        most: so many blobs are checked at most, chosen by chance.

    Raises: MissingState without a checkpoint topic; CorruptRecord; UnavailableError, AccessDenied: then nothing is
        known of the blobs that were left.
    """
    records = _chosen(read(), tasks)
    needed = _needed(services, records)  # 1
    found = Verified(
        tasks=len(records),
        checkpoints=sum(len(record.checkpoints) for record in records),
        blobs=len({ref.blob_id for ref in needed.uses}),
        size=sum(use.stored for use in needed.uses.values()),
        damaged=list(needed.damaged.values()),
        lost=list(islice(lost_backups(services, records), _MOST_LOST)),
    )
    uses = {ref: use for ref, use in needed.uses.items() if only is None or ref.blob_id in only}
    if most is not None:
        uses = {ref: uses[ref] for ref in _shuffled(services, uses)[:most]}
    found.checked = len({ref.blob_id for ref in uses})
    _look(services, _undamaged(uses, found), found, progress)  # 2
    _read(services, _undamaged(uses, found), sample, found, progress)  # 3
    if found.damaged or found.expiring:
        wrong = {finding.blob_id for finding in (*found.damaged, *found.expiring)}
        _forget_evicted(found, _needed(services, _chosen(read(), tasks), wrong))  # 4
    return found


def _chosen(records: Mapping[str, CheckpointRecord], tasks: Sequence[str]) -> list[CheckpointRecord]:
    return [records[task] for task in sorted(records, key=task_index) if not tasks or task in tasks]


def _undamaged(uses: Mapping[BlobRef, _Use], found: Verified) -> Mapping[BlobRef, _Use]:
    damaged = {finding.blob_id for finding in found.damaged}
    return {ref: use for ref, use in uses.items() if ref.blob_id not in damaged}


def lost_backups(services: Services, records: Iterable[CheckpointRecord]) -> Iterator[Finding]:
    """The changelogs that have lost what current checkpoints need. Raises: UnavailableError, AccessDenied."""
    for record in records:
        for (_, store), why in lost_targets(services, record.current).items():
            yield Finding("", why, record.task, store, str(record.current.checkpoint_id))


# --- step 1 ------------------------------------------------------------------------------------------------------


def _needed(services: Services, records: Iterable[CheckpointRecord], wanted: Collection[str] = ()) -> _Needed:
    """``wanted``: the blobs for which the checkpoints that need them are noted."""
    needed = _Needed(needed_by={blob_id: set() for blob_id in wanted})
    read = partial(_needed_by_task, services, Catalogue(services.transfer), frozenset(wanted))
    with services.executors.pool("search", _PARALLELISM) as pool:
        for of_task in pool.map(read, records):
            for ref, use in of_task.uses.items():
                needed.use(ref, use)
            for blob_id, finding in of_task.damaged.items():
                needed.damaged.setdefault(blob_id, finding)
            for blob_id, checkpoints in of_task.needed_by.items():
                needed.needed_by[blob_id] |= checkpoints
    return needed


def _needed_by_task(
    services: Services, catalogue: Catalogue, wanted: frozenset[str], record: CheckpointRecord
) -> _Needed:
    needed = _Needed()
    for store, checkpoint, parts in _stores(services, catalogue, record):
        checkpoint_id = checkpoint.checkpoint_id
        blob_ids: set[str] = set()
        try:
            for ref, stored in parts:
                needed.use(ref, _Use(stored, record.task, store, checkpoint_id, checkpoint_id.millis))
                blob_ids.add(ref.blob_id)
        except (MissingError, CorruptError) as error:
            blob_id = str(error.where.get("blob", ""))
            blob_ids.add(blob_id)
            needed.damaged.setdefault(blob_id, Finding(blob_id, error.message, record.task, store, str(checkpoint_id)))
        for blob_id in blob_ids & wanted:
            needed.needed_by.setdefault(blob_id, set()).add(checkpoint_id)
    return needed


def _stores(
    services: Services, catalogue: Catalogue, record: CheckpointRecord
) -> Iterator[tuple[str, Checkpoint, Iterable[tuple[BlobRef, int]]]]:
    """The parts of blobs that each store needs in each checkpoint: store by store, because the checkpoints of a store
    share indexes, and the newest first."""
    stores = {store for one in record.checkpoints for store in one.state_checkpoint_markers.get(BLOB_STORE, {})}
    for store in sorted(stores):
        for checkpoint in record.checkpoints:
            if (marker := checkpoint.marker(BLOB_STORE, store)) is not None:
                yield store, checkpoint, catalogue.needed(services.identity(record.task, store), marker)
    for checkpoint in record.checkpoints:
        yield "", checkpoint, ((one.blob, one.blob.size) for one in checkpoint.attachments if one.blob is not None)


# --- steps 2 and 3 -----------------------------------------------------------------------------------------------


def _look(services: Services, uses: Mapping[BlobRef, _Use], found: Verified, progress: Progress) -> None:
    if not uses:
        return
    store = services.blobs()
    settled_ms = store.administration.time_ms() - services.config.commit_timeout_ms
    parts: dict[str, list[BlobRef]] = {}
    for ref in uses:
        parts.setdefault(ref.blob_id, []).append(ref)

    def look(blob_id: str) -> None:
        refs = parts[blob_id]
        info = store.stat(blob_id)
        for ref in refs:
            problem = ref.size_problem(uses[ref].stored, info.size)
            if problem:
                raise CorruptBlob(problem, blob=blob_id)
        if info.expires_ms is not None and min(uses[ref].oldest_ms for ref in refs) < settled_ms:
            found.expiring.append(uses[refs[0]].finding(refs[0], "the blob still has a TTL"))

    for blob_id, error in _each(services, list(parts), look, "check", progress):
        found.damaged.append(uses[parts[blob_id][0]].finding(parts[blob_id][0], error.message))


def _read(services: Services, uses: Mapping[BlobRef, _Use], share: float, found: Verified, progress: Progress) -> None:
    if not uses or not share:
        return
    transfer = services.transfer()
    chosen = _shuffled(services, uses)[: math.ceil(len(uses) * share)]
    damaged: dict[str, Finding] = {}
    for ref, error in _each(services, chosen, lambda ref: transfer.read_back(ref, uses[ref].stored), "read", progress):
        damaged[ref.blob_id] = uses[ref].finding(ref, error.message)
    found.damaged += damaged.values()
    found.read = len(chosen)
    found.read_size = sum(uses[ref].stored for ref in chosen)


def _shuffled(services: Services, uses: Iterable[BlobRef]) -> list[BlobRef]:
    """In another order in each run."""
    salt = services.ids.token().encode()
    return sorted(uses, key=lambda ref: content_hash(salt + ref.hash + ref.blob_id.encode()))


def _each(
    services: Services, items: Sequence[T], action: Callable[[T], None], what: str, progress: Progress
) -> Iterator[tuple[T, StatemgrError]]:
    """Do something with each item, in parallel. Yields: what is missing or corrupt. Raises: any other error."""
    for done in range(0, len(items), _CHUNK):
        chunk = items[done : done + _CHUNK]
        for item, error in services.transfer().for_each(chunk, action).items():
            if not isinstance(error, MissingError | CorruptError):
                raise error
            yield item, error
        progress(what, done + len(chunk), len(items))


# --- step 4 ------------------------------------------------------------------------------------------------------


def _forget_evicted(found: Verified, now: _Needed) -> None:
    needed = {ref.blob_id for ref in now.uses} | now.damaged.keys()
    needed_by = {blob_id: list(map(str, sorted(ids, reverse=True))) for blob_id, ids in now.needed_by.items()}
    for findings in (found.damaged, found.expiring):
        findings[:] = [
            replace(finding, others=tuple(one for one in needed_by[finding.blob_id] if one != finding.checkpoint_id))
            for finding in findings
            if finding.blob_id in needed
        ]
