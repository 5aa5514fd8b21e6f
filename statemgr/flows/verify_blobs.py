"""Checks the blobs that the retained checkpoints of a job need. Reads only; fences nobody.

Steps of :func:`verify_blobs`:

1. read the checkpoint topic; the chain and the index of every store in every retained checkpoint name the blobs
2. ask the blob store for each blob: it must exist, have the size that was written, and have no TTL
3. on request, read all blobs or a random sample of them, and compare the hashes
4. if something is wrong, do step 1 again: a blob that no retained checkpoint needs any more is not reported

A commit removes the TTL of its blobs after its publish. So a TTL counts only where the checkpoint is older than
``task.commit.timeout.ms``, by the blob store's clock. Memory: one entry for each different part of a blob.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.services import Services
from statemgr.config.factories import BLOB_STORE
from statemgr.errors import CorruptBlob, CorruptError, MissingError, StatemgrError
from statemgr.ids import task_index
from statemgr.model.checkpoint import BlobRef, Checkpoint, CheckpointRecord
from statemgr.model.hashing import content_hash
from statemgr.ports import Progress

T = TypeVar("T")
#: Blobs that are checked before progress is reported.
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with a blob, and the newest retained checkpoint that needs it. ``store`` is empty for bytes that
    belong to the checkpoint itself, such as the output of a micro-batch."""

    blob_id: str
    problem: str
    task: str
    store: str
    checkpoint_id: str


@dataclass
class Verified:
    """What was checked, and what was wrong.

    Attributes:
        size: bytes of all blobs, as the retained checkpoints describe them.
        read, read_size: blobs, or parts of blobs, that were read whole, and their bytes.
        damaged: blobs that are missing or are not what was written.
        expiring: blobs that still have a TTL, and will disappear with it.
    """

    tasks: int = 0
    checkpoints: int = 0
    blobs: int = 0
    size: int = 0
    read: int = 0
    read_size: int = 0
    damaged: list[Finding] = field(default_factory=list)
    expiring: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Use:
    """The newest retained checkpoint that needs a part of a blob, and the time of the oldest one."""

    stored: int
    task: str
    store: str
    checkpoint_id: str
    oldest_ms: int

    def finding(self, ref: BlobRef, problem: str) -> Finding:
        return Finding(ref.blob_id, problem, self.task, self.store, self.checkpoint_id)


@dataclass
class _Needed:
    """Every part of a blob that is needed, and the indexes and chains that could not be read."""

    uses: dict[BlobRef, _Use] = field(default_factory=dict)
    damaged: list[Finding] = field(default_factory=list)


def verify_blobs(
    services: Services,
    read: Callable[[], Mapping[str, CheckpointRecord]],
    tasks: Sequence[str],
    sample: float,
    progress: Progress,
) -> Verified:
    """Check the blobs of ``tasks`` (empty: of all).

    Args:
        read: reads the newest record of every task from the topic.
        sample: the share of the blobs that is also read whole: 0 reads none, 1 reads all.

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
        damaged=needed.damaged,
    )
    _look(services, _undamaged(needed.uses, found), found, progress)  # 2
    _read(services, _undamaged(needed.uses, found), sample, found, progress)  # 3
    if found.damaged or found.expiring:
        _forget_evicted(found, _needed(services, _chosen(read(), tasks)))  # 4
    return found


def _chosen(records: Mapping[str, CheckpointRecord], tasks: Sequence[str]) -> list[CheckpointRecord]:
    return [records[task] for task in sorted(records, key=task_index) if not tasks or task in tasks]


def _undamaged(uses: Mapping[BlobRef, _Use], found: Verified) -> Mapping[BlobRef, _Use]:
    damaged = {finding.blob_id for finding in found.damaged}
    return {ref: use for ref, use in uses.items() if ref.blob_id not in damaged}


# --- step 1 ------------------------------------------------------------------------------------------------------


def _needed(services: Services, records: Iterable[CheckpointRecord]) -> _Needed:
    catalogue = Catalogue(services.transfer)
    needed = _Needed()
    for record in records:
        for checkpoint in record.checkpoints:  # the newest first
            for store, parts in _stores(services, catalogue, record.task, checkpoint):
                try:
                    for ref, stored in parts:
                        _use(needed.uses, ref, stored, record.task, store, checkpoint)
                except (MissingError, CorruptError) as error:
                    blob_id = str(error.where.get("blob", ""))
                    finding = Finding(blob_id, error.message, record.task, store, str(checkpoint.checkpoint_id))
                    if all(finding.blob_id != known.blob_id for known in needed.damaged):
                        needed.damaged.append(finding)
    return needed


def _stores(
    services: Services, catalogue: Catalogue, task: str, checkpoint: Checkpoint
) -> Iterator[tuple[str, Iterable[tuple[BlobRef, int]]]]:
    for store, marker in sorted(checkpoint.state_checkpoint_markers.get(BLOB_STORE, {}).items()):
        yield store, catalogue.needed(services.identity(task, store), marker)
    yield "", ((one.blob, one.blob.size) for one in checkpoint.attachments if one.blob is not None)


def _use(uses: dict[BlobRef, _Use], ref: BlobRef, stored: int, task: str, store: str, checkpoint: Checkpoint) -> None:
    known = uses.get(ref)
    millis = checkpoint.checkpoint_id.millis
    if known is None:
        uses[ref] = _Use(stored, task, store, str(checkpoint.checkpoint_id), millis)
    elif millis < known.oldest_ms:
        uses[ref] = _Use(stored, known.task, known.store, known.checkpoint_id, millis)


# --- steps 2 and 3 -----------------------------------------------------------------------------------------------


def _look(services: Services, uses: Mapping[BlobRef, _Use], found: Verified, progress: Progress) -> None:
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
    transfer = services.transfer()
    salt = services.ids.token().encode()  # another sample in each run
    shuffled = sorted(uses, key=lambda ref: content_hash(salt + ref.hash + ref.blob_id.encode()))
    chosen = shuffled[: math.ceil(len(uses) * share)]
    damaged: dict[str, Finding] = {}
    for ref, error in _each(services, chosen, lambda ref: transfer.read_back(ref, uses[ref].stored), "read", progress):
        damaged[ref.blob_id] = uses[ref].finding(ref, error.message)
    found.damaged += damaged.values()
    found.read = len(chosen)
    found.read_size = sum(uses[ref].stored for ref in chosen)


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
    needed = {ref.blob_id for ref in now.uses} | {finding.blob_id for finding in now.damaged}
    for findings in (found.damaged, found.expiring):
        findings[:] = [finding for finding in findings if finding.blob_id in needed]
