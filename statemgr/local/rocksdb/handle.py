"""Opening, closing, scanning and batching with rocksdict, each with its traps. Touches the database's directory.

Facts it rests on: column families are named at every open or their options are lost; anything that refers to the
database (an iterator, even an exhausted one) keeps its LOCK after ``close``; ``close`` after
``cancel_all_background`` raises "Shutdown in progress" and has closed; rocksdict's own item iterators end
silently at a corrupt block, so scans use the raw iterator and ask for its status.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from rocksdict import AccessType, Options, Rdict, RdictIter, ReadOptions, WriteBatch

from statemgr.errors import ClosedError, InvalidError
from statemgr.local.rocksdb.errors import translate, translated
from statemgr.model.commit import Change
from statemgr.os_errors import Fault, fault_in

_PROBE_SIZE = 1024 * 1024


def open_database(directory: Path, options: Options, *, read_only: bool = False) -> Rdict:
    """Open with these options for the only column family. Read-only takes no lock and sees what is in files.

    Raises: CorruptError, InvalidError (open elsewhere), DiskFull, AccessDenied.
    """
    access = AccessType.read_only(False) if read_only else AccessType.read_write()
    with translated("cannot open the store", directory):
        return Rdict(str(directory), options, column_families={"default": options}, access_type=access)


def close_database(database: Rdict, directory: Path) -> None:
    """Close without flushing. The lock is free when the last reference to ``database`` is gone."""
    try:
        database.cancel_all_background(True)
        database.close()
    except Exception as error:
        # close tries a flush, which was just cancelled: the database is closed all the same
        if "Shutdown in progress" not in str(error) and not _is_stuck(error):
            raise translate(error, "cannot close the store", directory) from error


def _is_stuck(error: Exception) -> bool:
    return fault_in(str(error)) in (Fault.FULL, Fault.LIMIT)


def batch_of(changes: Iterable[Change]) -> WriteBatch:
    """One atomic batch. Raises: ValueError when a key or value is not bytes."""
    batch = WriteBatch(raw_mode=True)
    put, delete = batch.put, batch.delete
    for key, value in changes:
        if value is None:
            delete(key)
        else:
            put(key, value)
    return batch


def in_key_order(changes: Iterable[Change]) -> Iterator[Change]:
    """The newest change of each key, in the keys' order: a memtable takes neighbours faster than it sorts by itself.

    Raises: InvalidError when a key is not bytes.
    """
    newest = dict(changes)
    try:
        keys = sorted(newest)
    except TypeError as error:
        raise InvalidError("cannot write a key that is not bytes") from error
    return zip(keys, map(newest.__getitem__, keys), strict=True)


class Scan(Iterator[tuple[bytes, bytes]]):
    """Items with ``start`` ≤ key < ``end`` as of its making; closing it ends it and lets the database go."""

    def __init__(self, database: Rdict, start: bytes | None, end: bytes | None, directory: Path) -> None:
        self._directory = directory
        self._closed = False
        self._items: RdictIter | None = None
        options = ReadOptions()
        #: RocksDB keeps a pointer to the bytes of the bound, which these options alone keep in memory.
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
            # not a context manager: this runs once per item
            raise translate(error, "cannot scan", self._directory) from error
        self._items = None
        raise StopIteration

    def move_to(self, database: Rdict) -> None:
        """Go on over another database, of the same content."""
        if self._items is not None and self._items.valid():
            items = database.iter(self._options)
            items.seek(self._items.key())
            self._items = items

    def close(self) -> None:
        """End the scan before its end: a later step of it raises ClosedError."""
        if self._items is not None:
            self._items = None
            self._closed = True


def range_deletion(database: Rdict, start: bytes | None, end: bytes | None) -> WriteBatch:
    """A batch with one tombstone over all keys with ``start`` ≤ key < ``end``; empty when there is none to delete."""
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
    """What an open database holds that is not in its files yet, as changes; at most what fits in its memtables.

    Compares all that it holds with a read-only view of the files.
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
    """Raises: OSError (ENOSPC) when the disk does not take a small file."""
    probe = directory / "space.tmp"
    try:
        with open(probe, "wb") as file:
            file.write(bytes(_PROBE_SIZE))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)
