"""Ports: what flows and engines need of the outside world, as Protocols. No I/O here.

Adapters (floor 2) implement ``Clock``, ``BlobStore``, ``CheckpointLog``, ``Publisher``, ``Changelog`` and
``LocalStore``; engines (floor 3) implement ``BackupManager`` and ``RestoreManager``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from statemgr.errors import RetryableError, StatemgrError
from statemgr.model.checkpoint import CheckpointRecord, Marker
from statemgr.model.commit import Change, ChangeSet, NumberedChanges, PreparedChanges
from statemgr.model.plan import OlderState

# --- time -----------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Wall time for people and TTLs; monotonic time for deadlines."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds, never going backwards."""

    def sleep(self, seconds: float) -> None: ...


# --- blobs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileSlice:
    """``length`` bytes of a local file from ``offset`` on, as the body of a PUT."""

    path: Path
    offset: int
    length: int


Body = bytes | FileSlice


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """What a LIST or HEAD says: name, size in bytes, time of its writing and of its expiry (epoch milliseconds;
    ``expires_ms`` None when it has no TTL; ``-1`` when it has one whose end the store does not tell)."""

    blob_id: str
    size: int
    modified_ms: int
    expires_ms: int | None = None


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """An upload that was begun and never ended: what it would have become, the store's own ``token`` for it, and when
    it was begun (epoch milliseconds by the store's time)."""

    blob_id: str
    token: str
    started_ms: int


class BlobReader(Protocol):
    """An open GET: ``readinto`` fills a buffer and returns how many bytes it got, 0 at the end."""

    def readinto(self, buffer: memoryview) -> int: ...


class BlobStore(Protocol):
    """A flat store of immutable blobs under names with ``/``. Safe to call from many threads.

    Errors of every method: UnavailableError (try again), AccessDenied, and DiskFull where it is a disk.
    """

    @property
    def checks_uploads(self) -> bool:
        """True when a PUT whose content does not match the checksum sent with it is known to be refused."""

    @property
    def listing_tells_ttl(self) -> bool:
        """True when ``expires_ms`` of what :meth:`list` gives can be relied on; otherwise only :meth:`stat` knows."""

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        """Write a new blob, whole or not at all, durable when it returns; expires after ``ttl_days`` if given."""

    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> AbstractContextManager[BlobReader]:
        """Open a blob for reading, from ``offset`` on. Raises: MissingBlob."""

    def delete(self, blob_id: str) -> None:
        """Delete a blob; one that does not exist is no error."""

    @property
    def most_deletes(self) -> int:
        """How many blobs one request can delete."""

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        """Delete up to ``most_deletes`` blobs at once. Returns: those it failed for, and why."""

    def remove_ttl(self, blob_id: str) -> None:
        """Keep a blob for ever; repeating it is no error. Raises: MissingBlob."""

    def stat(self, blob_id: str) -> BlobInfo:
        """Raises: MissingBlob."""

    def list(self, prefix: str, after: str | None = None) -> Iterator[BlobInfo]:
        """Every blob whose name starts with ``prefix``, page by page, always in the same order; with ``after`` only
        those that come later than this name in it. Never used by a restore."""

    def time_ms(self) -> int:
        """What the store's own clock says, the one that ``modified_ms`` comes from (epoch milliseconds).

        Raises: InvalidError where it does not tell.
        """

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """Uploads below ``prefix`` that were begun and not ended. Raises: InvalidError where it cannot tell."""

    def abandon(self, upload: UnfinishedUpload) -> None:
        """Free what an unfinished upload holds; one that has ended meanwhile is no error."""

    def probe(self) -> Sequence[str]:
        """Problems that ``doctor`` should show (no lifecycle rule, tags refused…); empty when all is well."""

    def close(self) -> None: ...


# --- the checkpoint topic -------------------------------------------------------------------------------------------


class CheckpointLog(Protocol):
    """The checkpoint topic, for reading."""

    def read(self, tasks: Collection[str] | None = None) -> Mapping[str, CheckpointRecord]:
        """The newest record of every task of the job (of ``tasks``) in the newest layout generation.

        Reads to the high watermark captured first, waiting for the last stable offset to pass it.
        Raises: CorruptRecord, UnavailableError (deadline), MissingState (the topic is gone or truncated).
        """

    def was_truncated(self) -> bool:
        """True when records before the first offset were removed from the topic."""


class Transaction(Protocol):
    """An open Kafka transaction. Sends only queue; :meth:`flush` waits until the broker has taken them."""

    def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        *,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> None: ...

    def send_changes(self, topic: str, partition: int, changes: Iterable[Change]) -> None:
        """Queue many records for one partition, with back-pressure; None as value is a tombstone."""

    def flush(self) -> Mapping[tuple[str, int], int]:
        """Wait for all deliveries. Returns, per topic and partition sent to, the offset after the last record.

        Raises: FencedError, RetryableError (the transaction must be given up).
        """


class Publisher(Protocol):
    """A transactional producer of one ``transactional.id``."""

    def fence(self) -> None:
        """Take the ID over: older owners are fenced, a pending transaction is settled. Raises: UnavailableError."""

    def transaction(self) -> AbstractContextManager[Transaction]:
        """One transaction: committed when the block ends, aborted when it raises.

        Raises: FencedError; RetryableError (surely not published); OutcomeUnknownError (call :meth:`settle`).
        """

    def settle(self) -> bool:
        """Bring a transaction whose outcome is unknown to an end, so that the topic can be read for it, and replace a
        producer that is beyond use. Asks nobody when there is neither.

        Returns: whether the ID had to be taken over once more, so that the other kind of owner must be fenced again.

        Raises: FencedError when another owner has taken over; UnavailableError when it cannot be settled yet.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as the broker describes it."""

    name: str
    topic_id: str
    partitions: int
    config: Mapping[str, str] = field(default_factory=dict)


class ChangelogRecord(NamedTuple):
    """One record of a changelog: raw bytes, its offset and timestamp (epoch milliseconds). Made by the million."""

    key: bytes
    value: bytes | None
    offset: int
    timestamp_ms: int


class ChangelogBatch(NamedTuple):
    """Changes read from a changelog, in order: bytes of their keys and values, and the offset after the last one."""

    changes: Sequence[Change]
    size: int
    end: int


class Changelog(Protocol):
    """Changelog topics, for reading. Positions are offsets; control records and compaction leave gaps."""

    def describe(self, topic: str) -> TopicInfo:
        """Raises: MissingState when the topic does not exist."""

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """First offset and high watermark (queried with read_uncommitted)."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Sequence[ChangelogRecord]]:
        """Committed records with ``start`` ≤ offset < ``end``, in batches, until the position reaches ``end``.

        Raises: UnavailableError (deadline), MissingState (``start`` is below the low watermark, or ``end`` beyond
        the high watermark), CorruptRecord (a null key).
        """

    def changes(self, topic: str, partition: int, start: int, end: int) -> Iterator[ChangelogBatch]:
        """The same as :meth:`read`, for replays of millions of records: keys and values only. Raises: as that."""


# --- local stores ---------------------------------------------------------------------------------------------------


class Items(Iterator[tuple[bytes, bytes]], Protocol):
    """A scan under way: items as of the moment that it was asked for."""

    def close(self) -> None:
        """Let go of what it holds, before its end. Repeating it is no error."""


class LocalStore(Protocol):
    """Ordered keyed bytes on the local machine (RocksDB, or memory)."""

    def get(self, key: bytes) -> bytes | None: ...

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def write(self, changes: Iterable[Change]) -> None:
        """Apply changes in order, all or nothing per call."""

    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        """Delete all keys with ``start`` ≤ key < ``end``, all or nothing; None is an open end."""

    def scan(self, start: bytes | None, end: bytes | None) -> Items:
        """Items with ``start`` ≤ key < ``end`` in key order, as of the moment of the call; None is an open end."""

    @property
    def sequence_number(self) -> int:
        """Grows with every write; equal numbers of one open store mean equal content."""

    def flush(self) -> None:
        """Bring everything written into files. Raises: DiskFull."""

    def statistics(self) -> Mapping[str, float]:
        """Numbers about the store for people, under names of its kind's own."""

    def compact_if_needed(self, limit: int) -> bool:
        """Let compaction catch up when ``limit`` files or more wait for it; for stores that are opened briefly."""

    def checkpoint(self, directory: Path) -> None:
        """Make ``directory`` (which must not exist) a consistent copy, by hard links where possible. Flush first."""

    def checkpoint_beside(self, directory: Path) -> None:
        """Flush and make ``directory`` a consistent copy, from another thread, while the owner writes.

        The copy has all that was written before the call, and perhaps what is written meanwhile.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CommittedDirectory:
    """A local directory that was made for exactly one state, and its files' hashes (path → size, XXH3-128)."""

    state_id: str
    path: Path
    files: Mapping[str, tuple[int, bytes]]


class LocalDirectories(Protocol):
    """The local directories of one store of one task. Everything in them is a cache."""

    def find(self, state_id: str) -> CommittedDirectory | None:
        """The directory made for this state, if it is here and its files verify (names, sizes, times; hashes where
        anything deviates). One that does not verify becomes one of the :meth:`leftovers`."""

    def reusable(self) -> Sequence[CommittedDirectory]:
        """Directories of other states whose files may be reused one by one, newest first, verified likewise."""

    def staging(self) -> Path:
        """A new name for a directory that is being made (it does not exist yet)."""

    def abandon(self, staging: Path) -> None:
        """Give up a staging directory that is not finished, but leave what is in it to another try."""

    def leftovers(self) -> Sequence[Path]:
        """Staging directories that were abandoned, or whose owners are dead, and committed ones that did not verify:
        nobody else uses them."""

    def hash_files(self, directory: Path) -> CommittedDirectory:
        """The content hashes of a finished directory, taken from remembered ones where the inode is held by a hard
        link in a committed directory, read otherwise. State ID empty. Files that are no state are left out."""

    def adopt(self, staging: Path, state_id: str, files: Mapping[str, tuple[int, bytes]] | None) -> CommittedDirectory:
        """Make a finished directory the one for ``state_id``: sync, record what it holds, swap it in by rename."""

    def clone(self, committed: CommittedDirectory | None) -> Path:
        """A private live directory to open a store in: hard links to immutable files, copies of the others.
        None gives a new empty one."""

    def discard(self, directory: Path) -> None:
        """Remove a staging or live directory."""

    def remove(self, state_id: str) -> None:
        """Remove the directory made for this state, whoever made it: it turned out to be of no use."""

    def keep_only(self, state_ids: Collection[str]) -> None:
        """Remove committed directories of other states, and stray staging and live directories of dead owners."""


# --- engines --------------------------------------------------------------------------------------------------------

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done_bytes_or_records, total_or_0)``."""


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Whose state it is."""

    job_name: str
    job_id: str
    task: str
    store: str


def _go_on() -> None:
    """Nobody gives the work up."""


class DirectoryNeeded(RetryableError):
    """A backend has to be filled, and there is no local directory to fill it from: the next commit makes one."""


@dataclass(frozen=True)
class StoreSnapshot:
    """What a backup manager gets: a finished local directory, its hashes, and the changes since the last
    acknowledged commit. ``whole`` iterates over the complete state (for a fill).

    ``made`` is None in a commit for which no backend needs a directory: then ``whole`` is of no use either.
    ``materialize``: store the directory as a snapshot even where the changes would do. ``check`` is called between
    pieces of long work; what it raises gives the work up.
    """

    identity: StoreIdentity
    state_id: str
    attempt: str
    made: CommittedDirectory | None
    changes: NumberedChanges
    whole: ChangeSet
    materialize: bool = False
    check: Callable[[], None] = _go_on

    @property
    def directory(self) -> CommittedDirectory:
        """The local directory. Raises: DirectoryNeeded when none was made."""
        if self.made is None:
            raise DirectoryNeeded(
                "a backend has to be filled, and no local directory of the store was made",
                hint="the next commit makes one",
                task=self.identity.task,
                store=self.identity.store,
            )
        return self.made


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

    def marker(self, delivered: Mapping[tuple[str, int], int]) -> Marker:
        """The marker, from what :meth:`Transaction.flush` returned."""


class BackupManager(Protocol):
    """One backend's part of a commit."""

    #: True when it needs the changes of each commit (and so a change buffer).
    needs_changes: bool
    #: True when it needs a finished local directory for each commit, and not only where it is filled.
    needs_directory: bool

    def prepare(self, snapshot: StoreSnapshot, base: Marker | None, *, portable: bool) -> PreparedBackup:
        """Make a snapshot durable. ``base`` is the marker in the acknowledged checkpoint (None: fill from nothing).
        ``portable``: the result leaves this process, so changes must be inline or in a blob."""

    def stage(self, identity: StoreIdentity, changes: PreparedChanges, base: Marker | None) -> StagedChanges:
        """Before the transaction: bring the changes here and check the target. Only where ``prepare`` gave changes."""

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

    def referenced_blobs(self, identity: StoreIdentity, marker: Marker) -> Collection[str]:
        """Names of all blobs that a restore from ``marker`` needs (for garbage collection: all others go).

        A backend from outside that has no such method makes garbage collection refuse.
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
    """A backend that keeps a snapshot and the segments of changes after it; the stores of a task share its blobs."""

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

    def backlog(self, identity: StoreIdentity, marker: Marker, origin: object | None = None) -> Backlog:
        """What a restore from a marker would have to apply; ``origin`` is that of the open store's changes.

        Raises: MissingBlob, CorruptBlob, UnavailableError.
        """

    def materialize(self, snapshot: StoreSnapshot, base: Marker) -> None:
        """Upload a snapshot that has every change below ``snapshot.changes.end``, and perhaps later ones, so that the
        next commit that is frozen begins with it and leaves out the segments that it covers.

        ``base`` is the marker in the acknowledged checkpoint. Raises: as :meth:`BackupManager.prepare`.
        """


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Bring the state that ``marker`` names into ``staging`` (which does not exist yet).

    ``reusable`` directories may give files by hard link. ``older``: state ID → what older retained checkpoints say of
    it; where such a state is among the reusable directories, a replay may start from it. ``leftovers`` are what earlier
    tries left unfinished: files may be moved out of them, and nothing in them is what it seems before it is verified.
    """

    identity: StoreIdentity
    marker: Marker
    staging: Path
    reusable: Sequence[CommittedDirectory]
    progress: Progress
    older: Mapping[str, OlderState] = field(default_factory=dict)
    leftovers: Sequence[Path] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore manager did: hashes of the files (None: to be read), bytes fetched, bytes reused, records."""

    files: Mapping[str, tuple[int, bytes]] | None
    bytes_fetched: int = 0
    bytes_reused: int = 0
    records: int = 0


class RestoreManager(Protocol):
    """One backend's part of a restore."""

    def restore(self, request: RestoreRequest) -> Restored:
        """Fill ``request.staging`` with a complete, verified directory. Raises: MissingState, MissingBlob,
        CorruptBlob, CorruptRecord, UnavailableError, DiskFull."""


class StateBackend(Protocol):
    """What a factory name stands for (entry point ``statemgr.state_backends``, or a dotted path).

    A backend class is called with a ``statemgr.backends.context.BackendContext``.
    """

    def backup_manager(self) -> BackupManager: ...

    def restore_manager(self) -> RestoreManager: ...

    def close(self) -> None: ...
