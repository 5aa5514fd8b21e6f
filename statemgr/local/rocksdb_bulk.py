"""Filling a new RocksDB store fast, for replays of a changelog. Touches the store's directory.

Measured facts: a vector memtable doubles the rate of writing and allows no concurrent writers; a ``get`` before its
flush takes milliseconds; reopening without naming the options keeps the bulk load's two levels and no compaction.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from rocksdict import Rdict

from statemgr.errors import ClosedError, InvalidError
from statemgr.local import rocksdb_options
from statemgr.local.os_errors import translated as os_translated
from statemgr.local.rocksdb import RocksDbStore
from statemgr.local.rocksdb_errors import translated
from statemgr.local.rocksdb_handle import batch_of, close_database, open_database
from statemgr.model.commit import Change

_BULK_BATCH = 10_000


class BulkWriter:
    """Takes the changes of a bulk load, in order."""

    def __init__(self, database: Rdict, directory: Path) -> None:
        self._database: Rdict | None = database
        self._directory = directory
        self._write_options = rocksdb_options.without_wal()

    def write(self, changes: Iterable[Change]) -> None:
        """Apply changes in order, any number of them. Raises: DiskFull, InvalidError (not bytes)."""
        with translated("cannot write", self._directory):
            pending = iter(changes)
            while (batch := batch_of(islice(pending, _BULK_BATCH))).len():
                if self._database is None:
                    raise ClosedError("the bulk load has ended", path=self._directory)
                self._database.write(batch, self._write_options)

    def finish(self, *, flush: bool) -> None:
        """Close; flush first when the load is whole (unsorted memtables must be, before anything reads them)."""
        database, self._database = self._database, None
        assert database is not None
        try:
            if flush:
                with translated("cannot flush the store", self._directory):
                    database.flush()
        finally:
            close_database(database, self._directory)


@contextmanager
def bulk_load(directory: Path, options: Mapping[str, object]) -> Iterator[BulkWriter]:
    """Fill a new store fast: unsorted memtables, no write-ahead log, one compaction at the end.

    The block writes; when it ends without an error, the directory holds a finished, closed store.
    Raises: DiskFull, CorruptError, InvalidError.
    """
    with os_translated("cannot make the store", directory):
        directory.mkdir(parents=True, exist_ok=True)
        if os.listdir(directory):
            raise InvalidError("a bulk load needs an empty directory", path=directory)
    writer = BulkWriter(open_database(directory, rocksdb_options.bulk(options)), directory)
    try:
        yield writer
    except BaseException:
        writer.finish(flush=False)
        raise
    writer.finish(flush=True)
    store = RocksDbStore.open(directory, options)
    try:
        store.compact()
        store.flush()
    finally:
        store.close()
