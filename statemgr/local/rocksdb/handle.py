"""Opens, closes, scans and writes databases with rocksdict, and translates its errors. Touches the directory.

It depends on these facts about rocksdict:

- Every open must name the column families, or their options are lost.
- Anything that refers to the database (an iterator, even an exhausted one) keeps its LOCK after ``close``.
- ``close`` after ``cancel_all_background`` raises "Shutdown in progress" although it has closed the database.
- Errors are plain ``Exception`` with RocksDB's status as their text (``Corruption: …``, ``IO error: …``). Those of
  rocksdict's own use of files are ``OSError`` without ``errno``, and their text ends in ``(os error 28)``.
- rocksdict's item iterators end silently at a corrupt block, so scans use the raw iterator and ask for its status.
- When the interpreter ends, it ends each daemon thread as soon as the thread comes back from native code. In Rust, this
  ends the process with SIGABRT (``FATAL: exception not rethrown``) in place of its exit code. So the end of the process
  waits for calls of daemon threads, and none begins after it.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rocksdict import AccessType, DbClosedError, Options, Rdict, RdictIter, ReadOptions, WriteBatch

from statemgr.errors import ClosedError, CorruptFile, InvalidError, StatemgrError
from statemgr.model.commit import Change
from statemgr.os_errors import Fault, fault_in, of_fault

_PROBE_SIZE = 1024 * 1024
_NOT_BYTES = "raw mode only support bytes"
#: What RocksDB was doing, in all its errors of reads.
_READING = re.compile(r"While [^:]*\bp?read(?!/)")
#: Most seconds that the end of the process waits for calls of other threads.
_MOST_S = 10.0
#: Seconds that a call waits after the end has begun: long enough for the process to be gone.
_LATE_S = 5.0
_DAMAGED = "remove the directory: the store is then restored"


def translate(error: Exception, what: str, path: Path) -> StatemgrError:
    """The typed error for an error of rocksdict. ``what``: begins the message (``"cannot …"``)."""
    if isinstance(error, DbClosedError):
        return ClosedError("the store is closed", path=path)
    if _NOT_BYTES in str(error):
        return InvalidError(f"{what}: {error}", hint="pass bytes as keys and values", path=path)
    text = str(error).strip()
    reason = f"{what}: {text}"
    if "LOCK" in text and ("lock hold by current process" in text or "While lock file" in text):
        return InvalidError(reason, hint="clone the directory: another store object or process has it open", path=path)
    is_corrupt = text.startswith(("Corruption", "Invalid argument"))
    fault = fault_in(text) or (Fault.ALTERED if is_corrupt or is_unreadable(text) else Fault.FAILED)
    hints = {Fault.GONE: _DAMAGED, Fault.ALTERED: _DAMAGED}
    return of_fault(fault, reason, path, kinds={Fault.GONE: CorruptFile}, hints=hints)


def is_unreadable(text: str) -> bool:
    """Whether the text of an error says that the disk cannot read a file. Another copy of it may be read."""
    return bool(_READING.search(text)) and any(os.strerror(number) in text for number in (errno.EIO, errno.ESTALE))


def is_vendors(error: Exception) -> bool:
    """Whether rocksdict raised the error. Errors of an iterator of changes are not translated."""
    if type(error) is OSError:
        return error.errno is None and "(os error " in str(error)
    return type(error) is Exception or isinstance(error, DbClosedError) or _NOT_BYTES in str(error)


_calls_changed = threading.Condition()
#: Threads that are inside of RocksDB.
_inside: set[int] = set()
_ended = False


def _forget_calls() -> None:
    global _calls_changed, _ended
    _calls_changed, _ended = threading.Condition(), False
    _inside.clear()


os.register_at_fork(after_in_child=_forget_calls)  # the threads of the parent are not in the child


@contextmanager
def _native_calls() -> Iterator[None]:
    """A block that calls RocksDB. Raises: ClosedError in a daemon thread of a process that ends."""
    thread = threading.current_thread()
    if not thread.daemon or thread.ident in _inside:
        yield
        return
    assert thread.ident is not None
    with _calls_changed:
        late = _ended
        if not late:
            _inside.add(thread.ident)
    if late:
        time.sleep(_LATE_S)
        raise ClosedError("the process ends")
    try:
        yield
    finally:
        with _calls_changed:
            _inside.discard(thread.ident)
            _calls_changed.notify_all()


def wait_for_calls() -> None:
    """Wait until no daemon thread is inside of RocksDB; none comes in any more. For the end of the process."""
    global _ended
    with _calls_changed:
        _ended = True
        _calls_changed.wait_for(lambda: not _inside, _MOST_S)


@contextmanager
def translated(what: str, path: Path) -> Iterator[None]:
    """A context manager for calls of rocksdict that raises its errors as typed ones.

    Raises: DiskFull, CorruptError, InvalidError (locked, or not bytes), ClosedError, AccessDenied, RetryableError.
    """
    try:
        with _native_calls():
            yield
    except Exception as error:
        if not is_vendors(error):
            raise
        raise translate(error, what, path) from error


def open_database(directory: Path, options: Options, *, read_only: bool = False) -> Rdict:
    """Open with these options for the only column family. ``read_only`` takes no lock, and sees only what is in files.

    Raises: CorruptError, InvalidError (open elsewhere), DiskFull, AccessDenied.
    """
    access = AccessType.read_only(False) if read_only else AccessType.read_write()
    with translated("cannot open the store", directory):
        return Rdict(str(directory), options, column_families={"default": options}, access_type=access)


def close_database(database: Rdict, directory: Path) -> None:
    """Close without flushing. The lock is released with the last reference to ``database``."""
    with _native_calls():
        try:
            database.cancel_all_background(True)
            database.close()
        except Exception as error:
            # close tries a flush, which was just cancelled; the database is closed nevertheless
            if "Shutdown in progress" not in str(error) and not _is_stuck(error):
                raise translate(error, "cannot close the store", directory) from error


def _is_stuck(error: Exception) -> bool:
    return fault_in(str(error)) in (Fault.FULL, Fault.LIMIT)


def batch_of(changes: Iterable[Change]) -> WriteBatch:
    """Changes as one atomic batch. Raises: ValueError if a key or value is not bytes."""
    batch = WriteBatch(raw_mode=True)
    put, delete = batch.put, batch.delete
    for key, value in changes:
        if value is None:
            delete(key)
        else:
            put(key, value)
    return batch


def in_key_order(changes: Iterable[Change]) -> Iterator[Change]:
    """The newest change of each key, in the order of the keys, which a memtable takes faster than unsorted ones.

    Raises: InvalidError if a key is not bytes.
    """
    newest = dict(changes)
    try:
        keys = sorted(newest)
    except TypeError as error:
        raise InvalidError("cannot write a key that is not bytes") from error
    return zip(keys, map(newest.__getitem__, keys), strict=True)


class Scan(Iterator[tuple[bytes, bytes]]):
    """Items with ``start`` ≤ key < ``end`` at the time of the call. Closing the scan releases the database."""

    def __init__(self, database: Rdict, start: bytes | None, end: bytes | None, directory: Path) -> None:
        self._directory = directory
        self._closed = False
        self._items: RdictIter | None = None
        options = ReadOptions()
        #: Must stay referenced: RocksDB has a pointer to the bytes of the bound in these options.
        self._options = options
        if end is not None:
            options.set_iterate_upper_bound(end)
        if end is None or (start or b"") < end:
            self._items = database.iter(options)
            if start is None:
                self._items.seek_to_first()
            else:
                self._items.seek(start)

    def __next__(self) -> tuple[bytes, bytes]:
        items = self._items
        if items is None:
            if self._closed:
                raise ClosedError("the scan was closed, by itself or with its store", path=self._directory)
            raise StopIteration
        try:
            if items.valid():
                item = items.key(), items.value()
                items.next()
                return item
            items.status()
        except Exception as error:
            # no context manager here: this runs once per item
            raise translate(error, "cannot scan", self._directory) from error
        self._items = None
        raise StopIteration

    def seek_again(self, start: bytes | None) -> None:
        """After an error, continue with the first item from there on, still as of the call."""
        if self._items is not None:
            if start is None:
                self._items.seek_to_first()
            else:
                self._items.seek(start)

    def move_to(self, database: Rdict) -> None:
        """Continue on another handle of a database with the same content."""
        if self._items is not None and self._items.valid():
            items = database.iter(self._options)
            items.seek(self._items.key())
            self._items = items

    def close(self) -> None:
        """End the scan early: its next step raises ClosedError."""
        if self._items is not None:
            self._items = None
            self._closed = True


def range_deletion(database: Rdict, start: bytes | None, end: bytes | None) -> WriteBatch:
    """A batch with one tombstone for all keys with ``start`` ≤ key < ``end``; empty if there are no such keys."""
    batch = WriteBatch(raw_mode=True)
    first = start or b""
    if end is None:
        # a tombstone needs an end: just after the last key
        items = database.iter()
        items.seek_to_last()
        if not items.valid():
            items.status()
            return batch
        end = items.key() + b"\x00"
    if first < end:
        batch.delete_range(first, end)
    return batch


def unflushed_changes(database: Rdict, directory: Path, options: Options) -> list[Change]:
    """The changes of an open database that are not in its files yet. They fit into its memtables.

    Compares the whole content with a read-only view of the files.
    Raises: CorruptError.
    """
    on_disk = open_database(directory, options, read_only=True)
    try:
        return list(_difference(Scan(database, None, None, directory), Scan(on_disk, None, None, directory)))
    finally:
        close_database(on_disk, directory)


def _difference(target: Iterator[tuple[bytes, bytes]], base: Iterator[tuple[bytes, bytes]]) -> Iterator[Change]:
    """The changes that turn ``base`` into ``target``, both in key order."""
    new, old = next(target, None), next(base, None)
    while new is not None or old is not None:
        if old is None or (new is not None and new[0] < old[0]):
            assert new is not None
            yield new
            new = next(target, None)
        elif new is None or old[0] < new[0]:
            yield old[0], None
            old = next(base, None)
        else:
            if new[1] != old[1]:
                yield new
            new, old = next(target, None), next(base, None)


def probe_space(directory: Path) -> None:
    """Raises: OSError (ENOSPC) if the disk has no room for a small file."""
    probe = directory / "space.tmp"
    try:
        with open(probe, "wb") as file:
            file.write(bytes(_PROBE_SIZE))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


_PROPERTIES = (
    "rocksdb.estimate-num-keys",
    "rocksdb.estimate-live-data-size",
    "rocksdb.live-sst-files-size",
    "rocksdb.total-sst-files-size",
    "rocksdb.num-files-at-level0",
    "rocksdb.estimate-pending-compaction-bytes",
    "rocksdb.compaction-pending",
    "rocksdb.num-running-compactions",
    "rocksdb.num-running-flushes",
    "rocksdb.num-immutable-mem-table",
    "rocksdb.cur-size-all-mem-tables",
    "rocksdb.size-all-mem-tables",
    "rocksdb.estimate-table-readers-mem",
    "rocksdb.block-cache-capacity",
    "rocksdb.block-cache-usage",
    "rocksdb.block-cache-pinned-usage",
    "rocksdb.num-snapshots",
    "rocksdb.actual-delayed-write-rate",
    "rocksdb.is-write-stopped",
    "rocksdb.background-errors",
)


def statistics_of(database: Rdict, options: Options) -> dict[str, float]:
    """RocksDB's properties under their own names, and counters and histograms if the options enable statistics."""
    found: dict[str, float] = {}
    for name in _PROPERTIES:
        value = database.property_int_value(name)
        if value is not None:
            found[name] = value
    for line in (options.get_statistics() or "").splitlines():
        found.update(_counted(line))
    return found


def _counted(line: str) -> dict[str, float]:
    """``name COUNT : 3`` is a ticker; ``name P50 : 1.5 P95 : … COUNT : 3 SUM : 7`` is a histogram."""
    name, *words = line.split()
    numbers = {
        label.lower(): float(value) for label, _, value in zip(words[::3], words[1::3], words[2::3], strict=True)
    }
    if set(numbers) == {"count"}:
        return {name: int(numbers["count"])}
    return {f"{name}.{label}": value for label, value in numbers.items()}
