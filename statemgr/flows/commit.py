"""Commit, up to the publish: from open stores to a prepared commit whose every part is durable.

Steps:

1. flush and make a checkpoint directory per changed store (``freeze``: the only pause of the task)
2. hash what is new, and keep the directory as the local copy of this state
3. per backend: diff against the acknowledged marker, upload, put the index; or collect the changes to send
4. hand over a prepared commit (``publish`` is the next flow)

Nothing here changes what is current: a prepared commit that is never published leaves only blobs that expire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from statemgr.config import StoreConfig
from statemgr.errors import RetryableError
from statemgr.flows.open_store import NO_CHANGES, FrozenStore, OpenStore, WholeState
from statemgr.flows.parts import Parts
from statemgr.model.checkpoint import Attachment, Checkpoint, Layout, Marker
from statemgr.model.commit import PreparedChanges, PreparedCommit, PreparedStore, ProducedRecord
from statemgr.phases import Phase, announce
from statemgr.ports import CommittedDirectory, PreparedBackup, StoreSnapshot

#: (factory, store) pairs whose marker must not be continued: the backend is filled anew (a tail, a lost topic).
Refill = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class CommitBase:
    """What a commit continues: the task, the owner's layout and epoch, and the acknowledged checkpoint (or None)."""

    task: str
    layout: Layout
    epoch: int
    checkpoint: Checkpoint | None
    refill: Refill = frozenset()

    def marker(self, factory: str, store: str) -> Marker | None:
        """The marker that a backend's next one continues; None where the backend must be filled."""
        if self.checkpoint is None or (factory, store) in self.refill:
            return None
        return self.checkpoint.marker(factory, store)


@dataclass(frozen=True)
class FrozenCommit:
    """All stores of a task at the moment of a commit, and the input offsets that belong to them."""

    attempt: str
    base: CommitBase
    input_offsets: Mapping[str, int]
    stores: Mapping[str, FrozenStore]
    produced: tuple[ProducedRecord, ...] = ()


def freeze(
    parts: Parts,
    stores: Mapping[str, OpenStore],
    base: CommitBase,
    input_offsets: Mapping[str, int],
    produced: Sequence[ProducedRecord] = (),
    attempt: str | None = None,
) -> FrozenCommit:
    """Step 1, the synchronous one. Raises: DiskFull; then nothing has changed and the commit can be repeated."""
    attempt = attempt or parts.ids.attempt_id()
    frozen: dict[str, FrozenStore] = {}
    try:
        for name, store in stores.items():
            if not store.config.backup_factories:
                continue
            needs_snapshot = store.changed or any(
                base.marker(factory, name) is None for factory in store.config.backup_factories
            )
            subject = f"{base.task}/{name}"
            announce(Phase.FLUSH, subject)
            if needs_snapshot:
                announce(Phase.CHECKPOINT_DIR, subject)
            state_id = store.state_id if not store.changed and store.state_id else f"{attempt}-{name}"
            frozen[name] = store.freeze(state_id, snapshot=needs_snapshot)
    except BaseException:
        discard(stores, frozen)
        raise
    return FrozenCommit(attempt, base, dict(input_offsets), frozen, tuple(produced))


def discard(stores: Mapping[str, OpenStore], frozen: Mapping[str, FrozenStore]) -> None:
    """Remove the checkpoint directories of a commit that is given up."""
    for name, store in frozen.items():
        if store.staging is not None:
            stores[name].directories.discard(store.staging)


def prepare(
    parts: Parts,
    stores: Mapping[str, OpenStore],
    frozen: FrozenCommit,
    *,
    portable: bool,
    attachments: Sequence[Attachment] = (),
    attached_blobs: Sequence[str] = (),
) -> PreparedCommit:
    """Steps 2 to 4: make everything durable.

    Args:
        portable: the result is published by another process, so everything it needs is inline or in a blob.
        attached_blobs: names of blobs that the attachments added.

    Raises: RetryableError, AccessDenied, DiskFull, CorruptBlob; then the next commit carries the same changes.
    """
    prepared: dict[str, PreparedStore] = {}
    backups: list[PreparedBackup] = []
    try:
        for name, store in frozen.stores.items():
            prepared[name], made = _prepare_store(parts, stores[name], frozen, store, portable)
            backups += made
    except BaseException:
        discard(stores, frozen.stores)
        raise
    base = frozen.base
    announce(Phase.PREPARED, base.task)
    return PreparedCommit(
        job_name=parts.config.job_name,
        job_id=parts.config.job_id,
        task=base.task,
        layout=base.layout,
        epoch=base.epoch,
        attempt=frozen.attempt,
        base_checkpoint_id=str(base.checkpoint.checkpoint_id) if base.checkpoint else None,
        input_offsets=frozen.input_offsets,
        stores=prepared,
        added_blobs=(*attached_blobs, *(blob for backup in backups for blob in backup.added_blobs)),
        attachments=tuple(attachments),
        produced=frozen.produced,
        added_bytes=sum(backup.added_bytes for backup in backups),
    )


def _prepare_store(
    parts: Parts, store: OpenStore, frozen: FrozenCommit, part: FrozenStore, portable: bool
) -> tuple[PreparedStore, list[PreparedBackup]]:
    factories = store.config.backup_factories
    markers: dict[str, Marker] = {}
    if part.state_id == store.state_id:
        for factory in factories:
            base = frozen.base.marker(factory, store.identity.store)
            carried = parts.backup_manager(factory).carry(store.identity, base) if base is not None else None
            if carried is not None:
                markers[factory] = carried
    pending = [factory for factory in factories if factory not in markers]
    if not pending:
        if part.staging is not None:
            store.directories.discard(part.staging)
        return PreparedStore(part.state_id, markers), []
    snapshot = _snapshot(parts, store, frozen, part)
    changes: dict[str, PreparedChanges] = {}
    made: list[PreparedBackup] = []
    for factory in pending:
        base = frozen.base.marker(factory, store.identity.store)
        backup = parts.backup_manager(factory).prepare(snapshot, base, portable=portable)
        made.append(backup)
        if backup.marker is not None:
            markers[factory] = backup.marker
        if backup.changes is not None:
            changes[factory] = backup.changes
    return PreparedStore(part.state_id, markers, changes), made


def _snapshot(parts: Parts, store: OpenStore, frozen: FrozenCommit, part: FrozenStore) -> StoreSnapshot:
    """Step 2: the local copy of this state, under its own ID."""
    committed = _local_copy(store, part)
    config: StoreConfig = store.config
    return StoreSnapshot(
        identity=store.identity,
        state_id=part.state_id,
        attempt=frozen.attempt,
        directory=committed,
        changes=part.changes if part.changes is not None else NO_CHANGES,
        whole=WholeState(parts, store.directories, config, committed),
    )


def _local_copy(store: OpenStore, part: FrozenStore) -> CommittedDirectory:
    if part.staging is None:
        here = store.directories.find(part.state_id)
        if here is None:
            store.state_id = None
            raise RetryableError(
                "a backend has to be filled, but the local copy of the unchanged store is gone",
                hint="the next commit takes a new snapshot",
                task=store.identity.task,
                store=store.identity.store,
            )
        return here
    hashed = store.directories.hash_files(part.staging)
    return store.directories.adopt(part.staging, part.state_id, hashed.files)
