"""An attempt at one task of a job that an engine runs, and the epoch that all attempts share."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from statemgr.blobs.counting import Counted, counts_of
from statemgr.config import JobConfig
from statemgr.engine.host import AttemptHost, attempt_host
from statemgr.errors import ClosedError, ConfigError, CorruptBlob, DiskFull, InvalidError, StatemgrError
from statemgr.flows.committing.attempt_snapshots import SnapshotEnd, overdue_stores
from statemgr.flows.committing.commit import CommitBase, Refill, discard, freeze, prepare
from statemgr.flows.committing.local_copies import compacted_copies, most_files, prefer_compacted
from statemgr.flows.committing.persist_ahead import PersistAhead
from statemgr.flows.opening.restore import StoreRestore, restore_task
from statemgr.ids import NAME, attachment_blob, check_offsets
from statemgr.model.checkpoint import SEQUENCE, Attachment, Checkpoint, Layout
from statemgr.model.commit import PreparedCommit
from statemgr.model.jobs.permissions import NO_PERMISSIONS, Permissions
from statemgr.model.record_size import inline_attachments_limit
from statemgr.os_errors import disk_errors
from statemgr.ports import FileSlice, Progress, no_progress
from statemgr.services import Closing
from statemgr.stores.open_store import FrozenStore, OpenStore
from statemgr.stores.store import Store

log = logging.getLogger(__name__)
#: Number of attachments that are read in parallel.
_READERS = 16
#: Most bytes of an attachment: a reader holds all of them in memory.
ATTACHMENT_LIMIT = 256 * 1024 * 1024


@dataclass(frozen=True)
class Epoch:
    """A fencing token of a whole job: its number, the layout, and what was published when it was acquired.

    ``refill``: task → (factory, store) pairs that the next commit must fill again.
    ``permissions``: the one-shot permissions that were given to :meth:`statemgr.StateManager.acquire`.
    ``sequence``: the sequence number before that of the first publish. After a permitted empty start it is the time in
    epoch milliseconds, so that no number is used twice.
    ``has_blobs``: whether a checkpoint of any task named blobs.
    """

    number: int
    layout: Layout
    checkpoints: Mapping[str, Checkpoint | None]
    refill: Mapping[str, Refill] = field(default_factory=dict)
    permissions: Permissions = NO_PERMISSIONS
    sequence: int = 0
    has_blobs: bool = False

    def after_publish(self) -> Epoch:
        """The epoch for the commits after the first one, which used up the permissions and refills."""
        return replace(self, checkpoints={}, refill={}, permissions=NO_PERMISSIONS)

    def to_bytes(self) -> bytes:
        """The epoch for other machines, as JSON without the checkpoints and the sequence number."""
        layout = self.layout
        return json.dumps(
            {
                "number": self.number,
                "layout": [layout.generation, layout.tasks, layout.partitioner],
                "refill": {task: sorted(pairs) for task, pairs in self.refill.items() if pairs},
                "permissions": self.permissions.names,
                "blobs": self.has_blobs,
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Epoch:
        """The inverse of :meth:`to_bytes`."""
        found = json.loads(data)
        refill = {task: frozenset((f, s) for f, s in pairs) for task, pairs in found["refill"].items()}
        permissions = Permissions(**dict.fromkeys(found["permissions"], True))
        layout = Layout(*found["layout"])
        return cls(found["number"], layout, {}, refill, permissions, has_blobs=found.get("blobs", False))


class Attempt:
    """One attempt at one task's part of a commit: private stores, opened at one checkpoint."""

    def __init__(
        self,
        host: AttemptHost,
        base: CommitBase,
        stores: dict[str, OpenStore],
        restored: list[StoreRestore],
        compacted: Mapping[str, Collection[str]],
    ) -> None:
        self.stores: Mapping[str, Store] = {
            name: Store(opened, opened.key_serde, opened.value_serde) for name, opened in stores.items()
        }
        self.restored = restored
        self._compacted = compacted
        self._frozen: Mapping[str, FrozenStore] = {}
        self._host = host
        self._services = services = host.services
        self.attempt_id = services.ids.attempt_id()
        self._directory: Path | None = None
        self._base = base
        self._open = stores
        self._ahead = PersistAhead(services, base.task, portable=True)
        for opened in stores.values():
            self._ahead.watch(opened, lambda: base)
        self._attachments: list[Attachment] = []
        self._attached_blobs: list[str] = []
        self._closed = False
        self._prepared = False
        self._segments: Mapping[str, tuple[int, int]] = {}
        host.attempts.add(self.attempt_id)

    @property
    def task(self) -> str:
        return self._base.task

    @property
    def segments(self) -> Mapping[str, tuple[int, int]]:
        """Store → number and bytes of the segments of the state that this attempt continues. After :meth:`prepare`."""
        return self._segments

    def take_blob_counts(self) -> Counted:
        """The requests to the blob store that this process has counted since the last call, for the metrics."""
        return counts_of(self._services.config.job_key).take()

    def take_snapshots(self) -> Sequence[SnapshotEnd]:
        """The background snapshots of this process that have ended since the last call, for the metrics."""
        return self._host.snapshots.take_ended()

    def store(self, name: str) -> Store:
        """Raises: ConfigError for an unknown name."""
        if name not in self.stores:
            raise ConfigError(f"the job has no store {name!r}", hint=f"it has {', '.join(self.stores) or 'none'}")
        return self.stores[name]

    def directory(self) -> Path:
        """A directory on the state's disk for this attempt's own files; :meth:`close` removes it. Raises: DiskFull."""
        if self._directory is None:
            self._directory = self._services.scratch() / f"attempt-{self.attempt_id}"
            with disk_errors(self._directory):
                self._directory.mkdir()
        return self._directory

    def attach(self, name: str, data: bytes | Path, *, alone: bool = False) -> None:
        """Publish bytes, or those of a file, with the commit: inline if they are few, otherwise in a blob.

        Args:
            alone: no other task attaches bytes of this kind. Then they may be 16 KiB in a job with many tasks, too.

        Raises: InvalidError for a name that is taken or more than 256 MiB; RetryableError, AccessDenied.
        """
        if not NAME.match(name) or name == SEQUENCE or any(name == attached.name for attached in self._attachments):
            raise InvalidError(f"{name!r} cannot be attached: use a plain name, and each name once", task=self.task)
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        if size > ATTACHMENT_LIMIT:
            raise InvalidError(
                f"the attachment {name!r} has {size} bytes; the limit is {ATTACHMENT_LIMIT}",
                hint="make batches smaller, for example with maxOffsetsPerTrigger of Spark's Kafka source",
                task=self.task,
            )
        inline_before = sum(len(attached.inline or b"") for attached in self._attachments)
        config = self._services.config
        if inline_before + size <= inline_attachments_limit(1 if alone else config.tasks):
            inline = data if isinstance(data, bytes) else data.read_bytes()
            self._attachments.append(Attachment(name, inline=inline))
            return
        blob_id = attachment_blob(config.job_key, self.task, self.attempt_id, name)
        body = data if isinstance(data, bytes) else FileSlice(data, 0, size)
        self._attachments.append(Attachment(name, blob=self._services.transfer().put(blob_id, body)))
        self._attached_blobs.append(blob_id)

    def prepare(self, input_offsets: Mapping[str, int] | None = None) -> PreparedCommit:
        """Make everything durable and describe it. Afterwards the attempt can only be closed.

        Args:
            input_offsets: source partition → next offset; None when ``manager.publish`` gets those of the whole job.

        Raises: RetryableError, AccessDenied, DiskFull.
        """
        if input_offsets is not None:
            check_offsets(input_offsets, task=self.task)
        if self._closed or self._prepared:
            raise ClosedError("the attempt is already closed or prepared", task=self.task)
        self._prepared = True
        for opened in self._open.values():
            opened.local.compact_if_needed(most_files(opened))
        overdue, self._segments = overdue_stores(self._services, self._open, self._base.checkpoint)
        overdue = [name for name in overdue if self._open[name].is_whole]
        with self._ahead.held():
            frozen = freeze(
                self._services, self._open, self._base, input_offsets, attempt=self.attempt_id, local_copies=overdue
            )
        try:
            self._ahead.wait()
        except BaseException:
            discard(self._open, frozen.stores)
            raise
        prepared = prepare(
            self._services,
            self._open,
            frozen,
            portable=True,
            materialize=overdue,
            attachments=self._attachments,
            attached_blobs=self._attached_blobs,
        )
        self._frozen = frozen.stores
        return prepared

    def close(self, *, wait: bool = True) -> None:
        """Leave local copies of the states that were prepared, from which the next attempt on this machine begins. Then
        close and remove the private stores and the directory. Idempotent.

        Args:
            wait: False to do this on another thread, which the next attempt of this process waits for.
        """
        if self._closed:
            return
        self._closed = True
        if wait or not self._host.closing.attempt(f"closing an attempt at {self.task}", self._end):
            self._end()

    def _end(self) -> None:
        with Closing() as closing:
            closing.callback(self._host.attempts.discard, self.attempt_id)
            if self._directory is not None:
                closing.callback(shutil.rmtree, self._directory, ignore_errors=True)
            for opened in self._open.values():
                closing.callback(opened.close)
            closing.callback(self._ahead.close)
            for name, opened in self._open.items():
                if opened.config.backup_factories:
                    self._leave_copy(name, opened)

    def _leave_copy(self, name: str, opened: OpenStore) -> None:
        """Leave a copy of a store, if it was prepared, and remove older ones. Copies are a cache: errors are logged."""
        if not opened.is_whole:
            return  # nothing is made of it, and what a dead process has left of it is needed
        # this attempt may not be the one that is published, so the state that it began with stays
        kept = _needed_copies(self._host, name, self._compacted, opened.state_id)
        with self._logged("no local copy is left for the next attempt"):
            if (part := self._frozen.get(name)) is not None:
                kept.add(part.state_id)
                opened.acknowledged(part, part.state_id)
                opened.leave_copy()
                self._host.compactions.start({opened: part.state_id})
        with self._logged("older local copies stay"):
            # compactions may have ended since this attempt was opened
            kept |= compacted_copies(self._host.services, self.task, self._base.checkpoint, name)
            opened.directories.keep_only(kept)

    @contextmanager
    def _logged(self, result: str) -> Iterator[None]:
        try:
            yield
        except (StatemgrError, OSError) as error:
            log.warning("%s: %s: %s", self.task, result, error)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def open_attempt(
    config: JobConfig,
    task: str,
    checkpoint: Checkpoint | None,
    epoch: Epoch,
    *,
    progress: Progress = no_progress,
    host: AttemptHost | None = None,
    by_need: bool = False,
) -> Attempt:
    """Open private copies of a task's stores at ``checkpoint``, on any machine.

    ``by_need``: this process lives on after the attempt, so a large store may be opened before all of it is here. The
    process fetches the rest, and later attempts share what is here (:mod:`statemgr.flows.opening.shared_state`).

    It needs Kafka only if a store is restored from a changelog. All attempts of this process share a host, unless one
    is given, for example with another clock. Raises: what :func:`statemgr.flows.opening.restore.restore_task` does.
    """
    host = host or attempt_host(config)
    host.closing.wait()
    if epoch.has_blobs:
        host.services.expect_blobs()  # the task may be new
    compacted = prefer_compacted(host.services, task, checkpoint) if checkpoint is not None else {}
    try:
        stores, restored = restore_task(
            host.services,
            task,
            checkpoint,
            permissions=epoch.permissions,
            progress=progress,
            by_need=host.shared if by_need else False,
            refill=epoch.refill.get(task, frozenset()),
        )
    except DiskFull:
        _make_room(host, task, checkpoint, compacted)
        raise
    with Closing() as undo:
        for store in stores.values():
            undo.callback(store.close)
        if checkpoint is not None:
            host.snapshots.start(stores, checkpoint)
        host.sweep.start([task])
        # the commit of this attempt makes the damaged backups again
        damaged = {(factory, one.store) for one in restored for factory in one.damaged}
        refill = epoch.refill.get(task, frozenset()) | damaged
        base = CommitBase(task, epoch.layout, epoch.number, checkpoint, refill)
        opened = Attempt(host, base, stores, restored, compacted)
        undo.pop_all()
    return opened


def _needed_copies(
    host: AttemptHost, name: str, compacted: Mapping[str, Collection[str]], began: str | None
) -> set[str]:
    """The state IDs of a store's local copies that attempts need: those of open attempts, compacted ones, and the state
    that an attempt begins with (None if there is none)."""
    kept = {*compacted.get(name, ()), *(f"{attempt}-{name}" for attempt in tuple(host.attempts))}
    return kept if began is None else kept | {began}


def _make_room(
    host: AttemptHost, task: str, checkpoint: Checkpoint | None, compacted: Mapping[str, Collection[str]]
) -> None:
    """Remove what processes that were killed have left, since no attempt can be opened that removes it at its end."""
    for name in host.services.config.stores:
        kept = _needed_copies(host, name, compacted, checkpoint.stores.get(name) if checkpoint is not None else None)
        with suppress(StatemgrError):
            host.services.directories(task, name).keep_only(kept)


def read_attachment(config: JobConfig, attachment: Attachment) -> bytes:
    """The bytes of an attachment. Raises: MissingBlob, CorruptBlob, UnavailableError."""
    if attachment.inline is not None:
        return attachment.inline
    if attachment.blob is None:
        raise CorruptBlob(f"attachment {attachment.name!r} has no content")
    return attempt_host(config).services.transfer().get_bytes(attachment.blob, ATTACHMENT_LIMIT)


def read_attachments(config: JobConfig, attachments: Sequence[Attachment]) -> list[bytes]:
    """The bytes of many attachments, read in parallel, in their order. Raises: as :func:`read_attachment`."""
    services = attempt_host(config).services
    return services.in_parallel("attachments", partial(read_attachment, config), attachments, _READERS)
