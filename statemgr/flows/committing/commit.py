"""Commit, up to the publish: turns open stores into a prepared commit, of which every part is durable.

Steps:

1. flush and, where a backend needs it, make a checkpoint directory per changed store (``freeze``: the only pause of
   the task)
2. per backend, either make a snapshot: diff against the acknowledged marker, hash and upload new files, then put the
   index; or take only the changes, to store them as a segment or to send them in the publish
3. keep the directory as the local copy of this state
4. return a prepared commit (``publish`` is the next flow)

Nothing here changes which state is current: a prepared commit that is never published leaves only blobs that expire.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from statemgr.errors import CorruptFile, MissingFile, RetryableError
from statemgr.model.checkpoint import Attachment, Checkpoint, Layout, Marker
from statemgr.model.commit import Change, ChangeSet, PreparedChanges, PreparedCommit, PreparedStore, ProducedRecord
from statemgr.phases import Phase, announce
from statemgr.ports import (
    BackupManager,
    DirectoryNeeded,
    FinishedDirectory,
    PreparedBackup,
    SegmentBackupManager,
    StoreIdentity,
    StoreSnapshot,
)
from statemgr.services import Closing, Services
from statemgr.stores.open_store import NO_CHANGES, FrozenStore, OpenStore

#: (factory, store) pairs whose backend has to be filled again, because its changelog has a tail or is gone.
Refill = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class CommitBase:
    """The base of a commit: the task, the owner's layout and epoch, and the acknowledged checkpoint (or None)."""

    task: str
    layout: Layout
    epoch: int
    checkpoint: Checkpoint | None
    refill: Refill = frozenset()

    def marker(self, factory: str, store: str) -> Marker | None:
        """The marker that a backend's next marker continues; None if the backend must be filled."""
        if self.checkpoint is None or (factory, store) in self.refill:
            return None
        return self.checkpoint.marker(factory, store)


@dataclass(frozen=True)
class FrozenCommit:
    """All stores of a task at the moment of a commit, and the input offsets that belong to them."""

    attempt: str
    base: CommitBase
    input_offsets: Mapping[str, int] | None
    stores: Mapping[str, FrozenStore]
    produced: tuple[ProducedRecord, ...] = ()


def freeze(
    services: Services,
    stores: Mapping[str, OpenStore],
    base: CommitBase,
    input_offsets: Mapping[str, int] | None,
    produced: Sequence[ProducedRecord] = (),
    attempt: str | None = None,
    *,
    local_copies: Collection[str] = (),
) -> FrozenCommit:
    """Step 1, which the task waits for.

    Args:
        local_copies: stores of which to make a directory, even if no backend needs one.

    Raises: DiskFull; then nothing has changed, and the commit can be repeated.
    """
    attempt = attempt or services.ids.attempt_id()
    frozen: dict[str, FrozenStore] = {}
    try:
        for name, store in stores.items():
            if not store.config.backup_factories:
                continue
            needs_snapshot = _needs_snapshot(services, store, base, name in local_copies)
            store.identity.announce(Phase.FLUSH)
            if needs_snapshot:
                store.identity.announce(Phase.CHECKPOINT_DIR)
            state_id = store.state_id if not store.changed and store.state_id else f"{attempt}-{name}"
            frozen[name] = store.freeze(state_id, snapshot=needs_snapshot)
    except BaseException:
        discard(stores, frozen)
        raise
    return FrozenCommit(attempt, base, None if input_offsets is None else dict(input_offsets), frozen, tuple(produced))


def _needs_snapshot(services: Services, store: OpenStore, base: CommitBase, local_copy: bool) -> bool:
    """Whether the commit needs a directory of the store: to keep it, to compare it, or to fill a backend from it."""
    managers = {factory: services.backup_manager(factory) for factory in store.config.backup_factories}
    filled = [manager for factory, manager in managers.items() if base.marker(factory, store.identity.store) is None]
    if store.changes_are_whole:
        filled = [manager for manager in filled if not manager.fills_from_changes]
    if store.directory_needed or filled:
        return True
    if local_copy and not store.changed:
        return store.state_id not in store.copies
    if local_copy or any(manager.needs_directory for manager in managers.values()):
        return store.changed
    if store.changed and store.has_much_to_store and any(services.segment_backends(store.config)):
        return True
    intervals = [manager.local_copy_interval_s for manager in managers.values()]
    return (
        store.changed
        and store.is_whole
        and all(interval_s is not None and store.copy_age_s > interval_s for interval_s in intervals)
    )


def discard(stores: Mapping[str, OpenStore], frozen: Mapping[str, FrozenStore]) -> None:
    """Remove the checkpoint directories of an abandoned commit."""
    for name, store in frozen.items():
        if store.staging is not None:
            stores[name].directories.discard(store.staging)


def prepare(
    services: Services,
    stores: Mapping[str, OpenStore],
    frozen: FrozenCommit,
    *,
    portable: bool,
    materialize: Collection[str] = (),
    attachments: Sequence[Attachment] = (),
    attached_blobs: Sequence[str] = (),
    check: Callable[[], None] = lambda: None,
) -> PreparedCommit:
    """Steps 2 to 4: make everything durable.

    Args:
        portable: another process publishes the result, so everything that it needs is inline or in a blob.
        materialize: stores to store as snapshots even if their changes would be enough.
        attached_blobs: names of blobs that the attachments added.
        check: called between pieces of long work; an exception from it ends the commit.

    Raises: RetryableError, AccessDenied, DiskFull, CorruptBlob; then the next commit carries the same changes.
        LocalStateLost: then no later commit of these stores succeeds.
    """
    return _Preparation(services, stores, frozen, portable, materialize, check).run(attachments, attached_blobs)


def fill(
    services: Services,
    stores: Mapping[str, OpenStore],
    base: CommitBase,
    input_offsets: Mapping[str, int] | None,
    *,
    attachments: Sequence[Attachment] = (),
    check: Callable[[], None] = lambda: None,
) -> PreparedCommit:
    """All steps for stores that were restored in order to fill ``base.refill`` from them: for a repair, a rollback or a
    copy. Closes the stores. Raises: as :func:`prepare`."""
    with Closing() as closing:
        for store in stores.values():
            closing.callback(store.close)
        frozen = freeze(services, stores, base, input_offsets)
        return prepare(services, stores, frozen, portable=False, attachments=attachments, check=check)


@dataclass
class _Backups:
    """The backups of one store in a commit: those that are made already, and the backends that still need one."""

    markers: dict[str, Marker]
    pending: list[str]
    changes: dict[str, PreparedChanges] = field(default_factory=dict)


@dataclass(frozen=True)
class _Preparation:
    """The arguments of :func:`prepare`, and its steps."""

    services: Services
    stores: Mapping[str, OpenStore]
    frozen: FrozenCommit
    portable: bool
    materialize: Collection[str]
    check: Callable[[], None]

    def run(self, attachments: Sequence[Attachment], attached_blobs: Sequence[str]) -> PreparedCommit:
        """All steps. Raises: as :func:`prepare`."""
        frozen, stores, config = self.frozen, self.stores, self.services.config
        try:
            found = {name: self._carried(name, part) for name, part in frozen.stores.items()}
            snapshots = {name: self._snapshot(name) for name, backups in found.items() if backups.pending}
            made = self._back_up(found, snapshots)
            for name, snapshot in snapshots.items():
                if frozen.stores[name].staging is not None:
                    stores[name].adopt(snapshot.directory, snapshot.state_id, frozen.stores[name].as_of)
        except (CorruptFile, MissingFile) as error:
            discard(stores, frozen.stores)
            # the file may belong to any of them, and a task is opened again as a whole
            lost = [store.give_up(error) for store in stores.values()]
            raise lost[0] from error
        except BaseException as error:
            if isinstance(error, DirectoryNeeded):
                for store in stores.values():
                    store.directory_needed = True
            discard(stores, frozen.stores)
            raise
        base = frozen.base
        announce(Phase.PREPARED, base.task, config.job_key)
        return PreparedCommit(
            job_name=config.job_name,
            job_id=config.job_id,
            task=base.task,
            layout=base.layout,
            epoch=base.epoch,
            attempt=frozen.attempt,
            base_checkpoint_id=str(base.checkpoint.checkpoint_id) if base.checkpoint else None,
            input_offsets=frozen.input_offsets,
            stores={
                name: PreparedStore(frozen.stores[name].state_id, backups.markers, backups.changes)
                for name, backups in found.items()
            },
            added_blobs=(*attached_blobs, *(blob for backup in made for blob in backup.added_blobs)),
            attachments=tuple(attachments),
            produced=frozen.produced,
            added_bytes=sum(backup.added_bytes for backup in made),
        )

    def _carried(self, name: str, part: FrozenStore) -> _Backups:
        """Keep the valid markers of an unchanged store, and remove its directory if no backend needs it."""
        store, markers = self.stores[name], dict[str, Marker]()
        for factory in store.config.backup_factories if part.state_id == store.state_id else ():
            base, manager = self.frozen.base.marker(factory, name), self.services.backup_manager(factory)
            if base is None:
                continue
            if name in self.materialize and _has_segments(manager, store.identity, base):
                continue
            carried = manager.carry(store.identity, base)
            if carried is not None:
                markers[factory] = carried
        pending = [factory for factory in store.config.backup_factories if factory not in markers]
        if not pending and part.staging is not None:
            store.directories.discard(part.staging)
        return _Backups(markers, pending)

    def _snapshot(self, name: str) -> StoreSnapshot:
        store, part = self.stores[name], self.frozen.stores[name]
        made = _finished(store, part) if part.staging is not None or part.state_id == store.state_id else None
        whole: ChangeSet | None = part.changes  # of a store that began empty
        if not store.changes_are_whole:
            whole = WholeState(self.services, store, made) if made is not None else None
        return StoreSnapshot(
            identity=store.identity,
            state_id=part.state_id,
            attempt=self.frozen.attempt,
            made=made,
            changes=part.changes if part.changes is not None else NO_CHANGES,
            whole=whole,
            materialize=name in self.materialize,
            check=self.check,
        )

    def _back_up(self, found: Mapping[str, _Backups], snapshots: Mapping[str, StoreSnapshot]) -> list[PreparedBackup]:
        """Step 2: backend by backend."""
        made: list[PreparedBackup] = []
        for factory in dict.fromkeys(factory for backups in found.values() for factory in backups.pending):
            names = [name for name, backups in found.items() if factory in backups.pending]
            requests = [(snapshots[name], self.frozen.base.marker(factory, name)) for name in names]
            backups = self.services.backup_manager(factory).prepare_all(requests, portable=self.portable)
            for name, backup in zip(names, backups, strict=True):
                made.append(backup)
                if backup.marker is not None:
                    found[name].markers[factory] = backup.marker
                if backup.changes is not None:
                    found[name].changes[factory] = backup.changes
        return made


def _has_segments(manager: BackupManager, identity: StoreIdentity, base: Marker) -> bool:
    return isinstance(manager, SegmentBackupManager) and manager.backlog(identity, base).segments > 0


def _finished(store: OpenStore, part: FrozenStore) -> FinishedDirectory:
    """The commit's directory, or the local copy of an unchanged store."""
    if part.staging is None:
        here = store.directories.find(part.state_id)
        if here is None:
            store.state_id, store.directory_needed = None, True
            raise RetryableError(
                "a backend needs the whole state, but the local copy of the unchanged store is gone",
                hint="commit again: the next commit makes a new copy",
                task=store.identity.task,
                store=store.identity.store,
            )
        return FinishedDirectory(here.path, dict(here.files))
    return store.finished(part.staging)


class WholeState:
    """The whole content of a store's finished directory as a change set, read during iteration."""

    def __init__(self, services: Services, store: OpenStore, made: FinishedDirectory) -> None:
        self._services, self._store, self._made = services, store, made

    @property
    def count(self) -> int:
        return sum(1 for _ in self)

    @property
    def size(self) -> int:
        """Bytes on disk: an estimate of the bytes of keys and values."""
        return sum(size for size, _ in self._made.files.values())

    def __iter__(self) -> Iterator[Change]:
        """Raises: LocalStateLost if a file is damaged. The next try then does not begin with the same directory."""
        directories = self._store.directories
        with self._store.local_files():
            live = directories.clone(self._made)
            try:
                store = self._services.open_store(self._store.config, live, True)
                try:
                    items: Iterable[tuple[bytes, bytes]] = store.scan(None, None)
                    yield from items
                finally:
                    store.close()
            finally:
                directories.discard(live)
