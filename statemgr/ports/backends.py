"""The ports of state backends, for commits, clean-ups and restores. No I/O here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from statemgr.errors import RetryableError
from statemgr.model.checkpoint import BlobRef, Marker
from statemgr.model.commit import Change, ChangeSet, NumberedChanges, PreparedChanges, StoreSession
from statemgr.model.plan import Successor
from statemgr.phases import Phase, announce
from statemgr.ports.kafka import Delivered, Transaction
from statemgr.ports.local import CommittedDirectory, FinishedDirectory, LocalStore, Moment

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done_bytes_or_records, total_or_0)``."""


def no_progress(what: str, done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Identifies the state of a store."""

    job_name: str
    job_id: str
    task: str
    store: str

    def __str__(self) -> str:
        return f"{self.task}/{self.store}"

    @property
    def job_key(self) -> str:
        """The name and the ID of the job, joined by ``/``."""
        return f"{self.job_name}/{self.job_id}"

    def announce(self, phase: Phase) -> None:
        """Tell observers that a step of this store is about to happen."""
        announce(phase, str(self), self.job_key)

    @property
    def where(self) -> dict[str, str]:
        """The fields that an error about this state has."""
        return {"job": self.job_name, "task": self.task, "store": self.store}


def _go_on() -> None:
    """Let the work continue."""


class DirectoryNeeded(RetryableError):
    """A backend has to be filled, but there is no local directory to fill it from. The next commit makes one."""


class BackupLost(RetryableError):
    """A backend has lost what the last checkpoint has there, so that changes alone cannot continue it. The next commit
    writes the whole state. ``where`` has the task, the store and the ``backend``."""


@dataclass(frozen=True)
class StoreSnapshot:
    """The input of a backup manager: a finished local directory, and the changes since the last acknowledged commit.

    ``made`` is None if no backend needs a directory in this commit. ``whole`` iterates over the complete state. It is
    None if there is no directory to read it from and the changes are not the complete state. ``materialize``: store the
    directory as a snapshot, even if the changes would be enough. Long work calls ``check`` now and then, and stops if
    that raises.
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
        """The local directory. Raises: DirectoryNeeded if none was made."""
        return self._needed(self.made)

    @property
    def content(self) -> ChangeSet:
        """The complete state, for a fill. Raises: DirectoryNeeded if there is nothing to read it from."""
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
    """What a backend made durable: its marker if that is known already, or the changes that the publishing transaction
    has to send. Also the names of the blobs that it added, and their total size in bytes."""

    marker: Marker | None = None
    changes: PreparedChanges | None = None
    added_blobs: tuple[str, ...] = ()
    added_bytes: int = 0


class StagedChanges(Protocol):
    """Changes on this machine, ready to be sent in a transaction."""

    def send(self, transaction: Transaction) -> None: ...

    def marker(self, delivered: Mapping[tuple[str, int], Delivered]) -> Marker:
        """The marker that follows from the result of :meth:`Transaction.flush`."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a restore would have to apply to the newest snapshot: the number of segments, and their bytes as stored.

    ``waiting``: a newer snapshot is stored, which the next commit begins with.
    """

    segments: int
    size: int
    waiting: bool


class BackupManager(ABC):
    """One backend's part of a commit. Only :meth:`prepare` has to be written.

    Everything else is as for a backend that copies the whole state at each commit, and that nobody else writes to.
    """

    #: Whether it needs the changes of each commit, and so a change buffer.
    needs_changes: bool = False
    #: Whether it needs a finished local directory for each commit, and not only for a fill.
    needs_directory: bool = True
    #: Whether the first changes of a store can fill it, without a directory.
    fills_from_changes: bool = False
    #: Seconds after which a commit makes a local directory although the backend needs none, so that a restart on this
    #: machine is fast. None if the backend needs no directory for that.
    local_copy_interval_s: float | None = None
    #: Whether it keeps older states next to newer ones, so that a job can :meth:`branch` from one.
    branches: bool = False

    # --- a commit ---

    @abstractmethod
    def prepare(self, snapshot: StoreSnapshot, base: Marker | None, *, portable: bool) -> PreparedBackup:
        """Make a snapshot durable. ``base`` is the marker in the acknowledged checkpoint, or None to fill the backend.
        ``portable``: another process publishes the result, so changes must be inline or in a blob."""

    def prepare_all(
        self, snapshots: Sequence[tuple[StoreSnapshot, Marker | None]], *, portable: bool
    ) -> Sequence[PreparedBackup]:
        """:meth:`prepare` for several stores of one task at once, each with its base.

        Raises: DirectoryNeeded if a store has to be filled and has no directory.
        """
        return [self.prepare(snapshot, base, portable=portable) for snapshot, base in snapshots]

    def stage(self, identity: StoreIdentity, changes: PreparedChanges, base: Marker | None) -> StagedChanges:
        """Before the transaction: bring the changes to this machine and check the target. Called only if ``prepare``
        returned changes.

        ``base`` is the marker in the acknowledged checkpoint, even if ``changes.fill`` does not continue it.
        """
        raise NotImplementedError

    def carry(self, identity: StoreIdentity, base: Marker) -> Marker | None:
        """The marker for an unchanged store: ``base`` if it is still valid, or None if the backend must be filled."""
        return base

    def branch(self, identity: StoreIdentity, marker: Marker, *, together: bool) -> PreparedBackup:
        """A new marker of the state that an older retained ``marker`` names, for a commit that goes back to it. Called
        only if it :attr:`branches`.

        Changes after the new marker are never confused with changes after the old one. This copies no data, and does
        not check every blob.

        Args:
            together: whether all tasks of the job are published together.

        Raises: MissingError, CorruptError, UnavailableError, AccessDenied.
        """
        raise NotImplementedError

    # --- what it depends on, and what it leaves behind ---

    def forget_local(self, identity: StoreIdentity) -> None:
        """Remove what is kept on this machine for a restart of the task. A failure is no error."""

    def clean_up(self, identity: StoreIdentity, evicted: Sequence[Marker], retained: Sequence[Marker]) -> None:
        """After an acknowledged publish: delete what no retained checkpoint references. Idempotent.

        ``retained`` is newest first, and empty if the store or the backend was removed. ``evicted`` is empty at an
        opening, which only finishes what a dead owner left behind.
        """

    def clean_up_all(
        self,
        task: StoreIdentity,
        evicted: Mapping[str, Sequence[Marker]],
        retained: Mapping[str, Sequence[Marker]],
    ) -> None:
        """:meth:`clean_up` for all stores of one task at once (of ``task`` the store does not count)."""
        for store, markers in evicted.items():
            self.clean_up(replace(task, store=store), markers, retained.get(store, ()))

    def added_blobs(self, identity: StoreIdentity, marker: Marker) -> Sequence[str]:
        """Names of the blobs that the commit of ``marker`` added. An opening removes their TTLs."""
        return ()

    def referenced_blobs(self, identity: StoreIdentity, marker: Marker) -> Collection[str] | None:
        """Names of all blobs that a restore from ``marker`` needs. Garbage collection deletes all others.

        None if the backend does not know. Garbage collection then refuses to run.
        """
        return None

    def needed(self, identity: StoreIdentity, marker: Marker) -> Iterator[tuple[BlobRef, int]]:
        """Every part of a blob that a restore from ``marker`` reads, and how many bytes it takes in its blob.

        Owners read them from time to time. Raises: MissingBlob, CorruptBlob, UnavailableError, AccessDenied.
        """
        return iter(())

    # --- a target that others may write to, such as a topic that the configuration names ---

    def has_tail(self, identity: StoreIdentity, marker: Marker) -> bool:
        """Whether the backend has committed changes after the marker. Only an adopted changelog can."""
        return False

    def guard_fill(
        self, identity: StoreIdentity, current: Marker | None, retired: Sequence[Marker], *, overwrite: bool
    ) -> None:
        """Before the first commit that fills the target: check that it may overwrite what is there now.

        Args:
            current: the marker in the acknowledged checkpoint. Records after it in the same target are overwritten.
            retired: markers of targets that the store had earlier. Each explains the records before it.
            overwrite: the one-shot permission to overwrite everything was given.

        Raises: PermissionNeeded, with the number of records that no marker explains; MissingState.
        """

    def loss_of(self, marker: Marker) -> str | None:
        """What a restore from a marker would lack in the target; None if nothing. Owners ask from time to time: answers
        are used again for some seconds. Raises: UnavailableError, AccessDenied.
        """
        return None


class SegmentBackupManager(BackupManager):
    """A backend that keeps a snapshot and the segments of changes after it. The stores of a task share its blobs.

    If it ``needs_changes``, its commits may be segments; otherwise each is a snapshot.
    """

    @abstractmethod
    def backlog(self, identity: StoreIdentity, marker: Marker, session: StoreSession | None = None) -> Backlog:
        """What a restore from a marker would have to apply; ``session`` is that of the open store.

        Without a session, ``waiting`` tells only of snapshots that other processes have left on this machine. Raises:
        MissingBlob, CorruptBlob, UnavailableError.
        """

    @abstractmethod
    def snapshot_made_ms(self, identity: StoreIdentity, marker: Marker) -> int:
        """When the snapshot of a marker was made, in epoch milliseconds. Raises: as :meth:`backlog`."""

    @abstractmethod
    def materialize(self, snapshot: StoreSnapshot, base: Marker) -> None:
        """Upload a snapshot that has every change below ``snapshot.changes.end``, and perhaps later ones. The next
        commit that is frozen builds on it, and leaves out the segments that it covers.

        ``base`` is the marker in the acknowledged checkpoint. Raises: as :meth:`BackupManager.prepare`.
        """

    @abstractmethod
    def leave_snapshot(self, identity: StoreIdentity, session: StoreSession, marker: Marker) -> None:
        """Leave the snapshot of :meth:`materialize` that no commit has built on to the next owner on this machine.

        The caller knows that the published state of ``marker`` has every change of the snapshot. Raises: MissingBlob,
        CorruptBlob, UnavailableError, DiskFull.
        """

    @abstractmethod
    def note_compacted(self, identity: StoreIdentity, state_id: str) -> None:
        """Note that the local directory of a state is compacted now: a later restore on this machine should begin with
        it, and apply the segments after it."""

    @abstractmethod
    def compacted(self, identity: StoreIdentity, marker: Marker) -> Collection[str]:
        """The states of compacted local directories that a restore from ``marker`` may begin with.

        Raises: as :meth:`backlog`.
        """

    @abstractmethod
    def materialize_published(self, snapshot: StoreSnapshot, marker: Marker) -> None:
        """Upload a snapshot of exactly the published state of ``marker``. A later commit of any process on this machine
        builds on it. Raises: as :meth:`BackupManager.prepare`.
        """


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Bring the state that ``marker`` names into ``staging`` (which does not exist yet).

    ``reusable`` directories may give files by hard link. ``older``: state ID → the marker that older retained
    checkpoints have of it; if such a state is among the reusable directories, a replay may start from it.
    ``leftovers`` are unfinished directories of earlier tries: the restore may move files out of them, and must verify
    each one first. ``successor``: the next retained checkpoint for which the backend has newer state, if there is one.
    ``retained``: the backend's markers in older retained checkpoints, newest first; if a blob of ``marker`` is damaged,
    their blobs may supply the same state.
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

    Bytes are counted uncompressed. ``damage``: what was missing or corrupt, although the restore could replace it; the
    backup has to be made again. ``tables``: hashes of the files that were there before a database wrote to them.
    """

    files: Mapping[str, tuple[int, bytes]] | None
    bytes_fetched: int = 0
    bytes_reused: int = 0
    records: int = 0
    damage: str | None = None
    tables: Mapping[str, tuple[int, bytes]] | None = None


class PartialState(Protocol):
    """A state that is open before all of it is here."""

    @property
    def store(self) -> LocalStore:
        """While parts are missing, it begins no compaction, and its checkpoints wait."""

    @property
    def fetched(self) -> int:
        """Bytes that were fetched, by need or as a part of the rest."""

    @property
    def missing(self) -> int:
        """Bytes that are still to come; 0 if everything is here and verified."""

    @property
    def faults(self) -> int:
        """How often something that was read was missing."""

    @property
    def rate(self) -> float:
        """Bytes of the rest that arrived per second so far."""

    def check_space(self) -> None:
        """Raises: DiskFull if there is no room for what is still to come."""

    def fetch_rest(self, check: Callable[[], None]) -> None:
        """Fetch and verify everything that is missing, hot files first. ``check`` is called now and then; an exception
        from it ends the work, and another call continues.

        Raises: CorruptFile (a part is missing or damaged in the backend), UnavailableError, AccessDenied, DiskFull.
        """

    @property
    def is_damaged(self) -> bool:
        """Whether a part was found missing or damaged in the backend."""

    @property
    def files(self) -> Mapping[str, tuple[int, bytes]]:
        """The files that reads and the rest fill: relative path → size and hash."""

    def follow(self, marker: Marker) -> int | None:
        """Apply what was published since. After an error, another call continues.

        Returns: the bytes that were fetched for it; None if the state of ``marker`` cannot be reached.
        Raises: as :meth:`RestoreManager.restore`.
        """

    def branch(self, directory: Path) -> PartialState:
        """Open another store of this state, as it is now, in a directory that does not exist. Its large files are the
        same files, so it works only while this state is open. The caller closes it.

        Raises: DiskFull, and as reads of the store.
        """


class RestoreManager(ABC):
    """One backend's part of a restore. Only :meth:`restore` has to be written."""

    @abstractmethod
    def restore(self, request: RestoreRequest) -> Restored:
        """Fill ``request.staging`` with a complete, verified directory. Raises: MissingState, MissingBlob,
        CorruptBlob, CorruptRecord, UnavailableError, DiskFull."""

    def open_by_need(self, request: RestoreRequest, at_least: int, *, owned: bool = False) -> PartialState | None:
        """Open the state before all of it is here: parts of it are fetched into ``request.staging`` when something
        reads them. The caller closes the store and removes the directory.

        Args:
            at_least: bytes of a snapshot from which this is wanted.
            owned: a task owns the store: what is damaged in the backend is reported as damage of local files, so that
                the task is opened again. Then, :meth:`restore` is wanted.

        Returns: None if the backend cannot, or if the state is smaller.
        Raises: as :meth:`restore`; so do reads of the store.
        """
        return None

    def changes_between(
        self, identity: StoreIdentity, older: Marker, newer: Marker, as_of: Moment
    ) -> Iterator[Sequence[Change]] | None:
        """The changes that lead from the state of ``older`` to that of ``newer``, in order; None if it does not have
        them. Some may be in the older state already. They are complete only when the iterator has ended.

        Args:
            as_of: a moment at which ``older`` was the newest state.

        Raises: as :meth:`restore`; so does the iterator.
        """
        return None


class StateBackend(Protocol):
    """What a factory name stands for (entry point ``statemgr.state_backends``, or a dotted path).

    A backend class is called with the :class:`statemgr.services.Services` of the job.
    """

    def backup_manager(self) -> BackupManager: ...

    def restore_manager(self) -> RestoreManager: ...

    def close(self) -> None: ...
