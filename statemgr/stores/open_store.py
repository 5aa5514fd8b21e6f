"""An open store of a task: its live database, the changes since the last acknowledged commit, and its local copies. A
task or an attempt owns it, and the commit flow freezes it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from statemgr.config import StoreConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import CorruptFile, LocalStateLost, MissingFile, StatemgrError
from statemgr.local.change_buffer import ChangeBuffer, FrozenChanges
from statemgr.local.machine import moment
from statemgr.model.commit import StoreSession
from statemgr.model.record_size import PRODUCER_LIMIT
from statemgr.model.segment import MAX_VALUE_SIZE
from statemgr.phases import Phase
from statemgr.ports import (
    CommittedDirectory,
    FinishedDirectory,
    LocalDirectories,
    LocalStore,
    Moment,
    PartialState,
    StoreIdentity,
)
from statemgr.serdes import Serde, key_serde, value_serde
from statemgr.services import Services
from statemgr.stores.expiry import ExpiringEntries
from statemgr.stores.write_buffer import WriteBuffer

log = logging.getLogger(__name__)
#: Seconds between two looks for local directories of earlier owners, if no other directory was made meanwhile.
_TIDY_S = 60.0
#: Seconds that a commit waits for the rest of a store's files, and between two looks.
_WHOLE_S, _LOOK_S = 60.0, 0.1
#: Bytes of changes that a store keeps in memory before it writes them to a local segment.
CHANGE_BUDGET = 32 * 1024 * 1024
#: From about this many bytes of changes that are not stored yet, a commit checks whether a snapshot would be smaller.
MUCH = 32 * 1024 * 1024


@dataclass(frozen=True)
class FrozenStore:
    """One store at the moment of a commit. ``staging``: None if nothing changed and no backend needs a snapshot.

    ``as_of``: a moment at which no newer state than this one was published yet, if one is known.
    """

    state_id: str
    staging: Path | None
    changes: FrozenChanges | None
    sequence_number: int
    as_of: Moment | None = None


@dataclass(frozen=True)
class OpenedByNeed:
    """A state that is open before all of it is here, its directory, which is a staging directory, and how many bytes
    were fetched to open it."""

    directory: Path
    state: PartialState
    fetched: int


class OpenStore:
    """One open store. One thread writes, while a commit may run on another one.

    Args:
        committed: the directory that it is cloned from, or the state itself, if it is open already and parts of it are
            still to come; None if it starts empty.
        state_id: the published state that it continues; None if it was never published.
        track_changes: whether a backend needs the changes of each commit.
        track_first: whether a backend also needs the changes before the first commit of a store that begins empty.
        read_first: open the database for reading only, until the first write.
        as_of: a moment at which no newer state than ``state_id`` was published yet, if one is known.

    Attributes:
        content: the write buffer; reads and writes go through it.
        entries: what the application reads and writes: the content, or in a store with a TTL the entries that live.
        local: the database below it, without the gathered changes.
        copies: state IDs whose local directories are kept: the current one, or those that it is rebuilt from.
        changes_are_whole: whether the unacknowledged changes are the whole state: the store began empty, and no commit
            of it was acknowledged yet.
        directory_needed: whether the next commit must make a directory, since a backend has to be filled from it.
        lost: the error if its local files were found damaged or gone; then the store is unusable.
    """

    def __init__(
        self,
        services: Services,
        identity: StoreIdentity,
        config: StoreConfig,
        committed: CommittedDirectory | OpenedByNeed | None,
        state_id: str | None,
        *,
        track_changes: bool,
        track_first: bool = True,
        read_first: bool = False,
        as_of: Moment | None = None,
    ) -> None:
        self.lost: LocalStateLost | None = None
        self._losing = threading.RLock()
        self._as_of = as_of
        self.identity = identity
        self.config = config
        self.directories: LocalDirectories = services.directories(identity.task, identity.store)
        self.by_need: PartialState | None = None
        self.local: LocalStore
        if isinstance(committed, OpenedByNeed):
            self.live, self.by_need, self.local = committed.directory, committed.state, committed.state.store
        else:
            self.live = self.directories.clone(committed)
            try:
                self.local = services.open_store(config, self.live, read_first)
            except BaseException:
                self.directories.discard(self.live)
                raise
        #: Called before the store is closed: ends the fetching of the rest. Returns: what is done when nothing writes
        #: to the files any more; None if they need not be left to the next opening.
        self.stop_fetching: Callable[[], Future[None] | None] = lambda: None
        self.state_id = state_id
        self.directory_needed = False
        self.copies = [state_id] if state_id and self.by_need is None else []
        self._clock = services.clock
        self._copied_s = self._clock.monotonic()
        self._tidying = threading.Lock()
        #: When the local directories were tidied last, on the clock of durations; None if there are others since.
        self._tidied_s: float | None = None
        self._committed_at = self.local.sequence_number
        try:
            self._buffer = ChangeBuffer(self.directories.staging(), CHANGE_BUDGET) if track_changes else None
        except BaseException:
            if self.by_need is None:  # otherwise the caller closes what it has opened
                self.local.close()
                self.directories.discard(self.live)
            raise
        tracked = self._buffer if track_first or committed is not None else None
        self.changes_are_whole = tracked is not None and committed is None
        self.content = WriteBuffer(identity, self.local, tracked, config.write_batch_size, self.give_up)
        if KAFKA_CHANGELOG in config.backup_factories and services.config.most_record_bytes < MAX_VALUE_SIZE:
            self.content.limit(services.config.most_record_bytes, PRODUCER_LIMIT)
        elif config.backup_factories:
            self.content.limit(MAX_VALUE_SIZE, "make the value smaller, or split it over several keys")
        self.entries: WriteBuffer | ExpiringEntries = self.content
        if config.ttl_ms is not None:
            self.entries = ExpiringEntries(identity, self.content, services.clock, config.ttl_ms)
        self._closed = False

    @cached_property
    def key_serde(self) -> Serde:
        """The configured serde of its keys."""
        return key_serde(self.config)

    @cached_property
    def value_serde(self) -> Serde:
        """The configured serde of its values. Raises: ConfigError if its schemas cannot be read."""
        return value_serde(self.config)

    @property
    def changed(self) -> bool:
        """Whether it has changes that the published checkpoint does not have."""
        return self.state_id is None or self.content.pending > 0 or self.local.sequence_number != self._committed_at

    @property
    def has_much_to_store(self) -> bool:
        """Whether there are so many bytes of changes that a snapshot could be smaller, and one can be made."""
        return self.is_whole and self._buffer is not None and self._buffer.has_unfrozen(MUCH)

    @property
    def is_whole(self) -> bool:
        """Whether all of its files are here. Otherwise no directory can be made."""
        return not self.bytes_to_come

    @property
    def bytes_to_come(self) -> int:
        """Bytes of its files that are not here yet."""
        return self.by_need.missing if self.by_need is not None else 0

    def delete_expired(self) -> None:
        """In a store with a TTL, take the next step of the walk that deletes what has expired. The walk reads
        everything, so it begins when everything is here. Raises: as :meth:`ExpiringEntries.delete_expired`."""
        if self.is_whole and isinstance(self.entries, ExpiringEntries):
            self.entries.delete_expired()

    @property
    def uncommitted(self) -> int:
        """Number of changes that the published checkpoint does not have, as the database counts them."""
        return self.content.pending + self.local.sequence_number - self._committed_at

    @property
    def copy_age_s(self) -> float:
        """Seconds since the last local copy was committed, or the store was opened from one."""
        return self._clock.monotonic() - self._copied_s

    @property
    def session(self) -> StoreSession | None:
        """The session that numbers its changes; None if no backend needs changes."""
        return self._buffer.session if self._buffer is not None else None

    def give_up(self, error: CorruptFile | MissingFile | LocalStateLost) -> LocalStateLost:
        """Declare the local files damaged or gone. From now on every commit fails, and the next opening of the store on
        this machine checks each file before using it. Returns: the error to raise."""
        with self._losing:
            if self.lost is None:
                with suppress(StatemgrError):  # if all files are gone there is nothing to check
                    self.directories.distrust()
                if not isinstance(error, LocalStateLost):
                    error = LocalStateLost(
                        f"the local files of the store are damaged or gone: {error.message}",
                        hint="open the task again: its stores are restored, and it continues from its last checkpoint",
                        **{**error.where, "task": self.identity.task, "store": self.identity.store},
                    )
                self.lost = error
                log.warning("%s", self.lost)
            return self.lost

    @contextmanager
    def local_files(self) -> Iterator[None]:
        """A context manager around use of local files. Raises: LocalStateLost if they are damaged or gone."""
        try:
            yield
        except (CorruptFile, MissingFile) as error:
            raise self.give_up(error) from error

    def freeze(self, state_id: str, *, snapshot: bool) -> FrozenStore:
        """The part of a commit that the task waits for: flush, and on request make a checkpoint directory.

        Raises: LocalStateLost, DiskFull.
        """
        if self.lost is not None:
            raise self.lost
        # the new state is published later than now
        as_of = self._as_of if state_id == self.state_id else moment(self._clock)
        self.content.flush()
        changes = None
        if self._buffer is not None:
            changes = self._buffer.freeze()
            self.content.track(self._buffer)
        staging = None
        if snapshot:
            self._wait_until_whole()
            with self.local_files():
                self.local.flush()
                staging = self._staged(self.local.checkpoint)
        return FrozenStore(state_id, staging, changes, self.local.sequence_number, as_of)

    def _wait_until_whole(self) -> None:
        """Wait, but not longer than a commit may; making a directory is an error then."""
        if self.is_whole:
            return
        log.info("%s: the commit needs a directory, and waits for %d bytes to come", self.identity, self.bytes_to_come)
        until = self._clock.monotonic() + _WHOLE_S
        while not self.is_whole and self.lost is None and self._clock.monotonic() < until:
            self._clock.sleep(_LOOK_S)

    def freeze_changes(self) -> FrozenChanges:
        """The changes so far, without those in the write buffer and without touching the database."""
        assert self._buffer is not None
        return self._buffer.freeze()

    def changes_in(self, frozen: FrozenStore) -> int:
        """Number of changes in ``frozen`` since the last acknowledged commit, as the database counts them."""
        return frozen.sequence_number - self._committed_at

    @property
    def committed_at(self) -> int:
        """The database's sequence number at the published state."""
        return self._committed_at

    def concurrent_snapshot(self) -> tuple[Path, FrozenChanges, int]:
        """Make a checkpoint directory while the task continues. Returns: the directory; a range of changes: the
        directory has all changes below the ``end`` of the range, and perhaps later ones; and a sequence number of the
        database after which it has none.

        Raises: DiskFull, ClosedError, LocalStateLost.
        """
        assert self._buffer is not None
        end = self._buffer.seal()
        with self.local_files():
            staging = self._staged(self.local.concurrent_checkpoint)
        return staging, self._buffer.nothing_until(end), self.local.sequence_number

    def finished(self, staging: Path) -> FinishedDirectory:
        """The files of a checkpoint directory. Raises: LocalStateLost if a file was altered since it was committed."""
        with self.local_files():
            return self.directories.finished(staging)

    def _staged(self, make: Callable[[Path], None]) -> Path:
        """Let ``make`` fill a staging directory; remove it if that fails."""
        self._tidied_s = None
        staging = self.directories.staging()
        try:
            make(staging)
        except BaseException:
            self.directories.discard(staging)
            raise
        return staging

    def adopt(self, made: FinishedDirectory, state_id: str, as_of: Moment | None = None) -> None:
        """Keep a checkpoint directory as the local copy of a state. Reads and hashes files that have no hash yet.

        Raises: LocalStateLost, also when another thread found the damage meanwhile: a damaged file that this directory
            shares with an older one would pass for a trusted one.
        """
        with self._losing, self.local_files():
            if self.lost is not None:
                raise self.lost
            adopted = self.directories.adopt(made.path, state_id, made.files, as_of)
        # if there is an earlier copy of the same state, it is kept instead: other files with the same content
        made.path, made.files = adopted.path, dict(adopted.files)

    def keep_snapshot(self, made: FinishedDirectory, state_id: str) -> None:
        """Keep a background snapshot as a local copy, as :meth:`adopt` does."""
        with self._tidying:
            self.adopt(made, state_id)
            self.copies = [*self.copies[-1:], state_id]

    def copy_published(self) -> bool:
        """Make a local copy of the published state, from another thread while the task continues.

        Returns: whether there is one. There is none if the store has unpublished changes. Raises: DiskFull.
        """
        state_id = self.state_id
        if state_id is None or self.directories.find(state_id) is not None:
            return state_id is not None
        if self.changed or not self.is_whole or self.lost is not None:
            return False
        staging = self._staged(self.local.concurrent_checkpoint)
        try:
            if self.changed or self.state_id != state_id:
                return False
            self.keep_snapshot(self.directories.finished(staging), state_id)
        finally:
            self.directories.discard(staging)
        return True

    def tidy(self) -> None:
        """Remove local directories that a restart on this machine would not use."""
        with self._tidying:
            now_s = self._clock.elapsed()
            # most commits make no directory, and looking for those of other owners is most of what they do on the disk
            if self._tidied_s is None or now_s - self._tidied_s >= _TIDY_S:
                self._tidied_s = now_s
                self.directories.keep_only(self.copies)

    def leave_copy(self) -> bool:
        """Before closing: make a local copy of the acknowledged state, so that the next start on this machine is fast.

        Returns: whether it was needed. Raises: LocalStateLost, DiskFull.
        """
        if self.state_id is None or self.changed or self.state_id in self.copies or not self.config.backup_factories:
            return False
        if self.lost is not None or not self.is_whole:
            return False
        self.identity.announce(Phase.LOCAL_COPY)
        with self.local_files():
            self.local.flush()
            staging = self._staged(self.local.checkpoint)
        try:
            self.adopt(self.finished(staging), self.state_id, self._as_of)
            self.copies = [self.state_id]
        finally:
            self.directories.discard(staging)
        return True

    def acknowledged(self, frozen: FrozenStore, state_id: str) -> None:
        """Continue from ``frozen``, which was published as ``state_id``."""
        self.state_id = state_id
        self._as_of = frozen.as_of
        self.directory_needed = self.changes_are_whole = False
        if frozen.staging is not None:
            with self._tidying:
                self.copies = [state_id]
            self._copied_s = self._clock.monotonic()
        self._committed_at = frozen.sequence_number
        if self._buffer is not None and frozen.changes is not None:
            self._buffer.acknowledge(frozen.changes)

    def close(self) -> None:
        """Close the database and remove its live directory. Committed state is elsewhere. A store that was opened by
        need leaves its files to the next opening if there is no local copy yet."""
        if self._closed:
            return
        self._closed = True
        ended = self.stop_fetching()
        if self.copies or self.lost is not None:
            ended = None
        self.content.close()
        try:
            self.local.close()
        except (CorruptFile, MissingFile) as error:
            self.give_up(error)  # the files are no longer needed
        finally:
            with ExitStack() as rest:
                rest.callback(put_away, self.directories, self.live, ended)
                if self._buffer is not None:
                    self._buffer.close()


def put_away(directories: LocalDirectories, directory: Path, ended: Future[None] | None) -> None:
    """Remove the directory of a closed store, or leave its files to the next opening.

    Args:
        ended: done when nothing writes to the files any more, which may be later; None: remove the directory.
    """
    if ended is None:
        directories.discard(directory)
    elif ended.done():
        directories.abandon(directory)
    else:
        ended.add_done_callback(lambda _: directories.abandon(directory))


NO_CHANGES = FrozenChanges(StoreSession(), 0, 0, ())
