"""The ports of state backends: what an engine gets and gives in a commit, a clean-up and a restore. No I/O here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from statemgr.errors import RetryableError
from statemgr.model.checkpoint import CheckpointRecord, Marker
from statemgr.model.commit import ChangeSet, NumberedChanges, PreparedChanges, StoreSession
from statemgr.model.plan import Successor
from statemgr.phases import Phase, announce
from statemgr.ports.kafka import Delivered, Transaction
from statemgr.ports.local import CommittedDirectory, FinishedDirectory

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done_bytes_or_records, total_or_0)``."""


def no_progress(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Whose state it is."""

    job_name: str
    job_id: str
    task: str
    store: str

    def __str__(self) -> str:
        return f"{self.task}/{self.store}"

    @property
    def job_key(self) -> str:
        """The job, as steps are announced for it."""
        return f"{self.job_name}/{self.job_id}"

    def announce(self, phase: Phase) -> None:
        """Tell observers that a step of this store is about to happen."""
        announce(phase, str(self), self.job_key)

    @property
    def where(self) -> dict[str, str]:
        """What an error says of it."""
        return {"job": self.job_name, "task": self.task, "store": self.store}


def _go_on() -> None:
    """Nobody gives the work up."""


class DirectoryNeeded(RetryableError):
    """A backend has to be filled, and there is no local directory to fill it from: the next commit makes one."""


@dataclass(frozen=True)
class StoreSnapshot:
    """What a backup manager gets: a finished local directory, and the changes since the last acknowledged commit.

    ``made`` is None in a commit for which no backend needs a directory. ``whole`` iterates over the complete
    state; it is None where there is no directory to read it from, and the changes are not all that there is.
    ``materialize``: store the directory as a snapshot even where the changes would do. ``check`` is called between
    pieces of long work; what it raises gives the work up.
    """

    identity: StoreIdentity
    state_id: str
    attempt: str
    made: FinishedDirectory | None
    changes: NumberedChanges
    whole: ChangeSet | None
    materialize: bool = False
    check: Callable[[], None] = _go_on

    @property
    def directory(self) -> FinishedDirectory:
        """The local directory. Raises: DirectoryNeeded when none was made."""
        return self._needed(self.made)

    @property
    def content(self) -> ChangeSet:
        """The complete state, for a fill. Raises: DirectoryNeeded when there is nothing to read it from."""
        return self._needed(self.whole)

    def _needed(self, found: T | None) -> T:
        if found is None:
            raise DirectoryNeeded(
                "a backend needs the whole state, but the commit made no local directory of the store",
                hint="commit again: the next commit makes one",
                task=self.identity.task,
                store=self.identity.store,
            )
        return found


@dataclass(frozen=True, slots=True)
class PreparedBackup:
    """What a backend made durable: its marker if it is known already, or the changes that the publishing
    transaction has to send; and the names of the blobs it added, of ``added_bytes`` together."""

    marker: Marker | None = None
    changes: PreparedChanges | None = None
    added_blobs: tuple[str, ...] = ()
    added_bytes: int = 0


class StagedChanges(Protocol):
    """Changes brought to this machine, ready to be sent inside a transaction."""

    def send(self, transaction: Transaction) -> None: ...

    def marker(self, delivered: Mapping[tuple[str, int], Delivered]) -> Marker:
        """The marker, from what :meth:`Transaction.flush` returned."""


class BackupManager(Protocol):
    """One backend's part of a commit."""

    #: True when it needs the changes of each commit (and so a change buffer).
    needs_changes: bool
    #: True when it needs a finished local directory for each commit, and not only where it is filled.
    needs_directory: bool
    #: True when a store's very first changes fill it as well as a directory would.
    fills_from_changes: bool
    #: Seconds after which a commit makes a local directory although the backend needs none, so that a restart on this
    #: machine is quick; None where the backend has another way to that.
    local_copy_interval_s: float | None

    def prepare(self, snapshot: StoreSnapshot, base: Marker | None, *, portable: bool) -> PreparedBackup:
        """Make a snapshot durable. ``base`` is the marker in the acknowledged checkpoint (None: fill from nothing).
        ``portable``: the result leaves this process, so changes must be inline or in a blob."""

    def stage(self, identity: StoreIdentity, changes: PreparedChanges, base: Marker | None) -> StagedChanges:
        """Before the transaction: bring the changes here and check the target. Only where ``prepare`` gave changes.

        ``base`` is the marker in the acknowledged checkpoint, also where ``changes.fill`` does not continue it.
        """

    def carry(self, identity: StoreIdentity, base: Marker) -> Marker | None:
        """The marker for an unchanged store: the base's if it is still valid, or None when it must be filled."""

    def clean_up(self, identity: StoreIdentity, evicted: Sequence[Marker], retained: Sequence[Marker]) -> None:
        """After an acknowledged publish: delete what no retained checkpoint references. Idempotent.

        ``retained`` is newest first and empty when the store or the backend was removed; ``evicted`` is empty at an
        open, where only what a dead owner left behind is finished.
        """

    def has_tail(self, identity: StoreIdentity, marker: Marker) -> bool:
        """Whether the backend holds committed changes beyond the marker (only an adopted changelog can)."""

    def added_blobs(self, identity: StoreIdentity, marker: Marker) -> Sequence[str]:
        """Names of the blobs that the commit of ``marker`` itself added (for REMOVE_TTL at open)."""

    def referenced_blobs(self, identity: StoreIdentity, marker: Marker) -> Collection[str] | None:
        """Names of all blobs that a restore from ``marker`` needs: garbage collection deletes all others.

        None: the backend does not know. Garbage collection refuses then.
        """


@runtime_checkable
class GuardedBackupManager(BackupManager, Protocol):
    """A backend whose target may hold what others wrote: a Kafka topic that the configuration names."""

    def guard_fill(
        self, identity: StoreIdentity, current: Marker | None, retired: Sequence[Marker], *, overwrite: bool
    ) -> None:
        """Before the first commit that fills the target: it may overwrite what is there now, and no more.

        Args:
            current: the marker in the acknowledged checkpoint; what follows it in the same target is overwritten.
            retired: markers of targets that the store had earlier; each explains what comes before it.
            overwrite: whether the one-shot permission was given to overwrite all that is there.

        Raises: PermissionNeeded, with the number of records that no marker explains; MissingState.
        """


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a restore would have to apply on top of the newest snapshot: segments, and their bytes as stored.

    ``waiting``: whether a newer snapshot is stored, which the next commit begins with.
    """

    segments: int
    size: int
    waiting: bool


@runtime_checkable
class SegmentBackupManager(BackupManager, Protocol):
    """A backend that keeps a snapshot and the segments of changes after it; the stores of a task share its blobs.

    Where it ``needs_changes`` its commits may be segments, and else each is a snapshot.
    """

    def prepare_all(
        self, snapshots: Sequence[tuple[StoreSnapshot, Marker | None]], *, portable: bool
    ) -> Sequence[PreparedBackup]:
        """:meth:`BackupManager.prepare` for several stores of one task at once, each with its base.

        Raises: DirectoryNeeded when a store has to be filled and has no directory.
        """

    def clean_up_all(
        self,
        task: StoreIdentity,
        evicted: Mapping[str, Sequence[Marker]],
        retained: Mapping[str, Sequence[Marker]],
    ) -> None:
        """:meth:`BackupManager.clean_up` for all stores of one task at once (of ``task`` the store does not count)."""

    def release_shared(self, read: Callable[[Collection[str]], Mapping[str, CheckpointRecord]]) -> None:
        """Now and then: delete blobs that tasks share and none retains any more. ``read``: the tasks' newest records,
        by a fresh read of the topic. Raises: UnavailableError and what ``read`` raises; then it is tried again.
        """

    def backlog(self, identity: StoreIdentity, marker: Marker, session: StoreSession | None = None) -> Backlog:
        """What a restore from a marker would have to apply; ``session`` is that of the open store.

        Without it, what waits is what :meth:`materialize_published` has stored. Raises: MissingBlob, CorruptBlob,
        UnavailableError.
        """

    def snapshot_made_ms(self, identity: StoreIdentity, marker: Marker) -> int:
        """When the snapshot of a marker was made, in epoch milliseconds. Raises: as :meth:`backlog`."""

    def materialize(self, snapshot: StoreSnapshot, base: Marker) -> None:
        """Upload a snapshot that has every change below ``snapshot.changes.end``, and perhaps later ones, so that the
        next commit that is frozen begins with it and leaves out the segments that it covers.

        ``base`` is the marker in the acknowledged checkpoint. Raises: as :meth:`BackupManager.prepare`.
        """

    def note_compacted(self, identity: StoreIdentity, state_id: str) -> None:
        """The local directory of a state that was prepared on this machine is compacted now: a later restore here had
        better begin with it, and apply the segments after it."""

    def compacted(self, identity: StoreIdentity, marker: Marker) -> Collection[str]:
        """The states of compacted local directories that a restore from ``marker`` may begin with.

        Raises: as :meth:`backlog`.
        """

    def materialize_published(self, snapshot: StoreSnapshot, marker: Marker) -> None:
        """Upload a snapshot of exactly the published state of ``marker``, so that a later commit on this machine, of
        whichever process, begins with it. Raises: as :meth:`BackupManager.prepare`.
        """


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Bring the state that ``marker`` names into ``staging`` (which does not exist yet).

    ``reusable`` directories may give files by hard link. ``older``: state ID → the marker that older retained
    checkpoints have of it; where such a state is among the reusable directories, a replay may start from it.
    ``leftovers`` are what earlier tries left unfinished: files may be moved out of them, and nothing in them is what it
    seems before it is verified. ``successor``: how the backend went on after the marker, where it did.
    ``retained``: the backend's markers in older retained checkpoints, newest first; where what ``marker`` names is
    damaged, what they name may supply the same state.
    """

    identity: StoreIdentity
    marker: Marker
    staging: Path
    reusable: Sequence[CommittedDirectory]
    progress: Progress
    older: Mapping[str, Marker] = field(default_factory=dict)
    leftovers: Sequence[Path] = ()
    successor: Successor | None = None
    retained: Sequence[Marker] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore manager did: hashes of the files (None: to be read), bytes fetched, bytes reused, records.

    Bytes are those of the content: what is compressed in the blob store counts as what it is here. ``damage``: what was
    missing or corrupt and could be replaced; the backup has to be made again all the same. ``tables``: hashes of the
    files that were there before a database wrote to them.
    """

    files: Mapping[str, tuple[int, bytes]] | None
    bytes_fetched: int = 0
    bytes_reused: int = 0
    records: int = 0
    damage: str | None = None
    tables: Mapping[str, tuple[int, bytes]] | None = None


class RestoreManager(Protocol):
    """One backend's part of a restore."""

    def restore(self, request: RestoreRequest) -> Restored:
        """Fill ``request.staging`` with a complete, verified directory. Raises: MissingState, MissingBlob,
        CorruptBlob, CorruptRecord, UnavailableError, DiskFull."""


class StateBackend(Protocol):
    """What a factory name stands for (entry point ``statemgr.state_backends``, or a dotted path).

    A backend class is called with the :class:`statemgr.backends.services.Services` of the job.
    """

    def backup_manager(self) -> BackupManager: ...

    def restore_manager(self) -> RestoreManager: ...

    def close(self) -> None: ...
