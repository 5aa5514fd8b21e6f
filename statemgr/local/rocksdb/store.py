"""RocksDB as a local store, through rocksdict. Touches the store's own directory and checkpoint targets.

There is no write-ahead log: committed changes are in a checkpoint directory, and the others are lost with the process.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Self

from rocksdict import Checkpoint, CompactOptions, Options, Rdict

from statemgr.errors import ClosedError, CorruptFile, DiskFull, InvalidError, RetryableError
from statemgr.local import trees
from statemgr.local.rocksdb import options as rocksdb_options
from statemgr.local.rocksdb.handle import (
    Scan,
    batch_of,
    close_database,
    in_key_order,
    open_database,
    probe_space,
    range_deletion,
    statistics_of,
    translate,
    translated,
    unflushed_changes,
)
from statemgr.local.rocksdb.tables import ingest
from statemgr.model.commit import Change
from statemgr.os_errors import translated as os_translated

_COMPACTION_POLL_SECONDS = 0.002
_COMPACTION_DEADLINE_SECONDS = 60.0
_LEVEL0_FILES = "rocksdb.num-files-at-level0"


class RocksDbStore:
    """Implements ``ports.LocalStore``. One thread writes; other threads may read and make checkpoints."""

    def __init__(
        self,
        directory: Path,
        values: Mapping[str, object],
        options: Options,
        database: Rdict,
        *,
        reads_only: bool = False,
    ) -> None:
        self._directory = directory
        self._values = values
        self._options = options
        self._database: Rdict | None = database
        self._write_options = rocksdb_options.without_wal()
        self._scans: weakref.WeakSet[Scan] = weakref.WeakSet()
        #: Why a write failed, until the store has recovered.
        self._stuck: DiskFull | RetryableError | None = None
        #: Set while the database is open for reading only: the directory is unchanged, and the first write opens it for
        #: writing.
        self._reads_only = reads_only
        #: Held while the database is closed and opened again, and by other threads than the owner while they use it.
        self._maintenance = threading.Lock()
        #: Changes to write after the disk was full and the database is reopened; None if there are none.
        self._rescued: list[Change] | None = None
        self._numbers_skipped = 0
        #: Whether the limits of writes are off, because level 0 had many files.
        self._is_behind = False
        if not reads_only:
            self._catch_up(database)

    @classmethod
    def open(cls, directory: Path, options: Mapping[str, object], *, read_first: bool = False) -> Self:
        """Open a store; an empty or missing directory becomes a new one.

        Args:
            options: names after ``stores.<name>.rocksdb.``; one that is missing has its default.
            read_first: delay opening for writing, which syncs five small files, until the first write.

        Raises: CorruptError (also for a directory with files but no database: nothing is recreated silently),
        InvalidError (open elsewhere), DiskFull, AccessDenied.
        """
        with os_translated("cannot open the store", directory):
            directory.mkdir(parents=True, exist_ok=True)
            files = len(os.listdir(directory))
            new = not files
            if not new and not (directory / "CURRENT").is_file():
                raise CorruptFile(
                    "the directory has files but no CURRENT: it is not a RocksDB database",
                    hint="remove the directory: the store is then restored",
                    path=directory,
                )
        normal = rocksdb_options.normal(options, create=new, files=files)
        reads_only = read_first and not new
        database = open_database(directory, normal, read_only=reads_only)
        return cls(directory, options, normal, database, reads_only=reads_only)

    @classmethod
    def open_snapshot(cls, directory: Path, options: Mapping[str, object]) -> RocksDbStore:
        """Open the files of a directory for reading, without a lock. Wrap the result in a ReadOnlyStore.

        Raises: CorruptError (also for a directory without a database), AccessDenied.
        """
        if not (directory / "CURRENT").is_file():
            raise CorruptFile("the directory has no RocksDB database", path=directory)
        normal = rocksdb_options.normal(options, create=False)
        database = open_database(directory, normal, read_only=True)
        return cls(directory, options, normal, database, reads_only=True)

    @classmethod
    def file_starts(cls, directory: Path) -> list[bytes]:
        """The first key of each table file of a finished directory. Raises: as :meth:`open_snapshot`."""
        store = cls.open_snapshot(directory, {})
        try:
            with translated("cannot list the files of the store", directory):
                return [bytes(file["start_key"]) for file in store._db.live_files()]
        finally:
            store.close()

    @property
    def _db(self) -> Rdict:
        if self._database is None:
            if self._rescued is None:
                raise ClosedError("the store is closed", path=self._directory)
            self._recover()
        assert self._database is not None
        return self._database

    @property
    def _writable(self) -> Rdict:
        """The database, opened for writing. Only the owner's thread calls this."""
        if self._reads_only:
            with self._maintenance:
                database = open_database(self._directory, self._options)
                for scan in list(self._scans):
                    scan.move_to(database)
                self._catch_up(database)
                # do not close the other handle: another thread may be reading from it
                self._database, self._reads_only = database, False
        return self._db

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None. Raises: CorruptError, ClosedError."""
        database = self._db
        try:
            value: bytes | None = database.get(key)
        except Exception as error:
            # no context manager here: this is the hot path
            raise translate(error, "cannot read", self._directory) from error
        return value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values in the order of the keys. Raises: CorruptError, ClosedError."""
        with translated("cannot read", self._directory):
            values: list[bytes | None] = self._db.get(list(keys))  # type: ignore[assignment]
        return values

    def write(self, changes: Iterable[Change]) -> None:
        """Raises: DiskFull (nothing of this call was applied), InvalidError, ClosedError."""
        with self._writing("cannot write"):
            batch = batch_of(in_key_order(changes))
            if batch.len():
                self._writable.write(batch, self._write_options)

    def ingest(self, tables: Sequence[Path]) -> None:
        """Raises: DiskFull, CorruptError (a file is not a table; then none was taken), ClosedError."""
        with self._writing("cannot ingest tables"):
            ingest(self._writable, tables)

    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        """Writes one tombstone, whatever the number of keys. Raises: DiskFull, ClosedError."""
        with self._writing("cannot delete a range"):
            batch = range_deletion(self._db, start, end)
            if batch.len():
                self._writable.write(batch, self._write_options)

    def scan(self, start: bytes | None, end: bytes | None) -> Scan:
        """Reads lazily. Raises: CorruptError; ClosedError if the store is closed meanwhile."""
        with translated("cannot scan", self._directory):
            scan = Scan(self._db, start, end, self._directory)
        self._scans.add(scan)
        return scan

    @property
    def sequence_number(self) -> int:
        return self._numbers_skipped + self._db.latest_sequence_number()

    def flush(self) -> None:
        """After DiskFull nothing is lost: call it again when there is space."""
        with self._writing("cannot flush the store"):
            if not self._reads_only:
                self._db.flush()

    def statistics(self) -> Mapping[str, float]:
        """RocksDB's properties under their own names (bytes, counts). The option ``statistics`` adds its tickers and
        histograms (microseconds). The numbers of the block cache and of memory cover all stores that share them.

        Raises: ClosedError.
        """
        with translated("cannot read the statistics of the store", self._directory):
            return statistics_of(self._db, self._options)

    def gauge(self, name: str) -> int | None:
        """A property of RocksDB. Any thread may call this."""
        if not self._maintenance.acquire(blocking=False):
            return None
        try:
            return None if self._database is None else self._database.property_int_value(name)
        finally:
            self._maintenance.release()

    def compact_if_needed(self, limit: int) -> bool:
        """Let RocksDB's own compaction catch up if level 0 has ``limit`` files or more. Returns: whether it had.

        A store that is opened per micro-batch would otherwise be closed each time before its compaction ends; a store
        that was opened briefly begins no compaction of its own. Waits at most a minute. Raises: ClosedError.
        """
        if self._number(_LEVEL0_FILES) < limit:
            return False
        self._catch_up(self._writable, begins=True)
        deadline = time.monotonic() + _COMPACTION_DEADLINE_SECONDS
        while time.monotonic() < deadline and not self._number("rocksdb.background-errors"):
            pending = self._number("rocksdb.compaction-pending")
            if not pending and not self._number("rocksdb.num-running-compactions"):
                break
            time.sleep(_COMPACTION_POLL_SECONDS)
        return True

    def compact(self) -> None:
        """Merge all files into the last level. Raises: DiskFull, CorruptError."""
        with self._writing("cannot compact the store"):
            self._writable.compact_range(None, None, CompactOptions())

    def checkpoint(self, directory: Path) -> None:
        """Raises: DiskFull, InvalidError if the directory exists."""
        if os.path.lexists(directory):
            raise InvalidError("the directory of a checkpoint already exists", path=directory)
        with self._writing("cannot make a checkpoint of the store"):
            self._link_files(self._db, directory)
        self._finish(directory)

    def _link_files(self, database: Rdict, directory: Path) -> None:
        if not self._reads_only:
            Checkpoint(database).create_checkpoint(str(directory))
            return
        # opened for reading only, so the files have not changed
        with os_translated("cannot make a checkpoint of the store", directory):
            directory.mkdir()
            trees.link_files(self._directory, directory, trees.state_files(self._directory))

    def _finish(self, directory: Path) -> None:
        """Remove files that a checkpoint does not need, and add those that its next opening would otherwise write and
        sync."""
        with os_translated("cannot make a checkpoint of the store", directory):
            with suppress(FileNotFoundError):
                shutil.copyfile(self._directory / "IDENTITY", directory / "IDENTITY")
            for log in directory.glob("*.log"):
                if log.stat().st_size:
                    raise CorruptFile("a checkpoint has a write-ahead log that is not empty", path=log)
                log.unlink()

    def concurrent_checkpoint(self, directory: Path) -> None:
        """Raises: DiskFull (the owner's next write or flush recovers from it), ClosedError."""
        if os.path.lexists(directory):
            raise InvalidError("the directory of a checkpoint already exists", path=directory)
        with self._maintenance:
            database = self._database
            if self._stuck is not None:
                raise copy(self._stuck)
            if database is None:
                raise ClosedError("the store is closed", path=self._directory)
            with translated("cannot make a checkpoint of the store", self._directory):
                if not self._reads_only:
                    database.flush()  # this is most of the work, and the owner does not wait for it
                self._link_files(database, directory)
            del database
        self._finish(directory)

    def close(self) -> None:
        """Close without flushing. Open scans end. Idempotent."""
        with self._maintenance:
            database, self._database, self._rescued = self._database, None, None
            self._reads_only = False
            if database is not None:
                self._end_scans()
                close_database(database, self._directory)

    def _end_scans(self) -> None:
        for scan in list(self._scans):
            scan.close()

    def _number(self, name: str) -> int:
        with translated("cannot read a property of the store", self._directory):
            return self._db.property_int_value(name) or 0

    def _catch_up(self, database: Rdict, *, begins: bool = False) -> None:
        """If level 0 has many files, let no write wait until RocksDB's own compaction has caught up.

        ``begins``: this also lets RocksDB begin to compact. Raises: ClosedError.
        """
        if not begins and self._values.get(rocksdb_options.BRIEF):
            return
        with translated("cannot compact the store", self._directory):
            is_behind = (database.property_int_value(_LEVEL0_FILES) or 0) >= rocksdb_options.MUCH_BEHIND
            changed = {"disable_auto_compactions": "false"} if begins else {}
            if is_behind:
                changed |= rocksdb_options.NO_LIMITS
            if changed:
                database.set_options(changed)
        self._is_behind = is_behind

    def _look_at_level0(self) -> None:
        """Set the limits of writes back when compaction has caught up."""
        if self._number(_LEVEL0_FILES) < rocksdb_options.MUCH_BEHIND:
            self._db.set_options(rocksdb_options.limits(self._values))
            self._is_behind = False

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        if self._stuck:
            self._recover()
        try:
            with translated(what, self._directory):
                if self._is_behind:
                    self._look_at_level0()
                yield
        except (DiskFull, RetryableError) as error:
            # RocksDB repeats the error of a failed flush for ever, even when there are descriptors or space again
            if not self._reads_only:
                self._stuck = copy(error)  # without the traceback, which would keep the database
            raise

    def _recover(self) -> None:
        """Reopen the database and write the changes that were only in memory. After a full disk, or without
        descriptors, RocksDB refuses all writes until then.

        Raises: DiskFull while there is no space; the changes are then kept for the next call.
        """
        with self._maintenance:
            if self._stuck or self._rescued is not None:
                self._reopen()

    def _reopen(self) -> None:
        directory = self._directory
        with os_translated("cannot write again", directory):
            probe_space(directory)
            files = len(os.listdir(directory))
        options = rocksdb_options.normal(self._values, create=False, files=files)
        if self._rescued is None:
            database = self._database
            assert database is not None
            before = self.sequence_number
            self._rescued = unflushed_changes(database, directory, options)
            self._end_scans()
            self._database = None
            close_database(database, directory)
            del database
            # sequence numbers start again at those in the files: never return one twice
            self._numbers_skipped = before + 1
        reopened = open_database(directory, options)
        self._catch_up(reopened)
        with translated("cannot write again", directory):
            reopened.write(batch_of(self._rescued), self._write_options)
        self._database, self._options, self._reads_only = reopened, options, False
        self._rescued = self._stuck = None
