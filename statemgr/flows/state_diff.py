"""Compare: the keys of a store that differ between two retained checkpoints of a task. Publishes nothing.

Steps of :func:`compare`:

1. states with the same ID are equal, so nothing is read
2. restore the older state into a scratch directory, and then the newer one into the same directory. The second restore
   reuses files and segments that both states have. A changelog is replayed from its beginning each time
3. read both in key order, and yield the keys whose values differ

Memory is bounded. The disk needs room for both states.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum

from statemgr.errors import MissingState
from statemgr.flows.opening.restore import restore_store
from statemgr.local import open_snapshot, remove
from statemgr.local.directories import StoreDirectories
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.content import differing
from statemgr.model.expiry import without_expiry
from statemgr.model.plan import plan_retained
from statemgr.ports import LocalDirectories, LocalStore, Progress
from statemgr.services import Services


class Kind(StrEnum):
    """What happened to a key between two checkpoints."""

    ADDED = "added"
    CHANGED = "changed"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A key that differs, and its values. None: the checkpoint does not have the key."""

    key: bytes
    before: bytes | None
    after: bytes | None

    @property
    def kind(self) -> Kind:
        """What happened to the key."""
        if self.before is None:
            return Kind.ADDED
        return Kind.DELETED if self.after is None else Kind.CHANGED


@dataclass(frozen=True)
class Pair:
    """Two retained checkpoints of one task: from ``before`` to ``after``."""

    record: CheckpointRecord
    before: Checkpoint
    after: Checkpoint


def find_pairs(
    records: Sequence[CheckpointRecord], before: str, after: str, *, all_of_them: bool = False
) -> list[Pair]:
    """The tasks that retain both checkpoints.

    Raises: MissingState if there is none, or with ``all_of_them`` if a task lacks one.
    """
    pairs = []
    for record in records:
        retained = {str(checkpoint.checkpoint_id): checkpoint for checkpoint in record.checkpoints}
        if before in retained and after in retained:
            pairs.append(Pair(record, retained[before], retained[after]))
        elif all_of_them:
            raise _not_both(record.task, before, after)
    if not pairs:
        raise _not_both("no task", before, after)
    return pairs


def _not_both(who: str, before: str, after: str) -> MissingState:
    does = "does not retain" if who != "no task" else "retains"
    return MissingState(
        f"{who} {does} both checkpoint {before} and checkpoint {after}",
        hint="choose two checkpoints of one task: `statemgr checkpoints list` shows the checkpoints that each retains",
    )


def compare(services: Services, pair: Pair, store: str, progress: Progress) -> Generator[KeyChange]:
    """The keys of a store that differ, in key order. Close the generator if you do not read it to its end.

    In a store with a TTL, an entry whose value was written again differs by its expiry. An entry that has expired is
    there until the task deletes it.

    Raises: MissingState, MissingBlob, CorruptError if a checkpoint cannot be restored; UnavailableError, AccessDenied,
        DiskFull.
    """
    if pair.before.stores.get(store) == pair.after.stores.get(store):  # 1
        return
    scratch = services.scratch_file("compare")
    directories = StoreDirectories(scratch, services.clock, services.ids)
    with ExitStack() as closing:
        closing.callback(remove, scratch)
        closing.callback(directories.close)
        opened: dict[int, LocalStore] = {}
        for checkpoint in sorted((pair.before, pair.after), key=lambda one: one.sequence):  # 2
            if store in checkpoint.stores:
                found = _restored(services, directories, pair.record, checkpoint, store, progress)
                closing.callback(found.close)
                opened[checkpoint.sequence] = found
        scans = [
            opened[one.sequence].scan(None, None) if store in one.stores else iter(())
            for one in (pair.before, pair.after)
        ]
        for key, (before, after) in differing(scans):  # 3
            yield KeyChange(
                key,
                without_expiry(before) if pair.before.has_ttl(store) else before,
                without_expiry(after) if pair.after.has_ttl(store) else after,
            )


def _restored(
    services: Services,
    directories: LocalDirectories,
    record: CheckpointRecord,
    checkpoint: Checkpoint,
    store: str,
    progress: Progress,
) -> LocalStore:
    config = services.config.stores[store]
    factories = {store: config.restore_factories}
    (plan,) = plan_retained(record, checkpoint, factories, job=services.config.job_name)
    apart = replace(services, directories=lambda _task, _store: directories)
    committed, _ = restore_store(apart, record.task, plan, progress)
    assert committed is not None
    return open_snapshot(config.type, committed.path, config.rocksdb)
