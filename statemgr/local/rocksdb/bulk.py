"""Fills a new RocksDB store fast, for replays of a changelog. Touches the store's directory.

Measured facts: a vector memtable doubles the rate of writing, but allows no concurrent writers. Before it is flushed, a
``get`` takes milliseconds. A database that is reopened without its options keeps the two levels of the bulk load and
does not compact.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from rocksdict import Rdict

from statemgr.errors import ClosedError, InvalidError
from statemgr.local.rocksdb import options as rocksdb_options
from statemgr.local.rocksdb.handle import batch_of, close_database, open_database, translated
from statemgr.local.rocksdb.store import RocksDbStore
from statemgr.model.commit import Change
from statemgr.os_errors import translated as os_translated

_BULK_BATCH = 10_000
#: Up to this many files in level 0, compaction is left to the open store, which can be read meanwhile.
LEVEL0_LIMIT = 16


class BulkWriter:
    """Writes the changes of a bulk load to the new database."""

    def __init__(self, database: Rdict, directory: Path) -> None:
        self._database: Rdict | None = database
        self._directory = directory
        self._write_options = rocksdb_options.without_wal()

    def write(self, changes: Iterable[Change]) -> None:
        """Apply any number of changes in order. Raises: DiskFull, InvalidError (not bytes)."""
        with translated("cannot write", self._directory):
            pending = iter(changes)
            while (batch := batch_of(islice(pending, _BULK_BATCH))).len():
                if self._database is None:
                    raise ClosedError("the bulk load has ended", path=self._directory)
                self._database.write(batch, self._write_options)

    def flush(self) -> None:
        """Write everything to files, which a later process finds. Raises: DiskFull."""
        if self._database is None:
            raise ClosedError("the bulk load has ended", path=self._directory)
        with translated("cannot flush the store", self._directory):
            self._database.flush()

    def final_tables(self, share: float) -> list[tuple[str, int]]:
        """The tables that nothing will rewrite: names and bytes.

        Args:
            share: the share of all changes that was written. If so many tables are to be expected that they are
                compacted at the end, no table is final.
        """
        if self._database is None:
            raise ClosedError("the bulk load has ended", path=self._directory)
        with translated("cannot list the tables", self._directory):
            found = self._database.live_files()
        if len(found) > LEVEL0_LIMIT * share:
            return []
        return [(str(table["name"]).removeprefix("/"), int(table["size"])) for table in found]

    def finish(self) -> int:
        """Flush, which unsorted memtables need before a read, and close.

        Returns: the number of files in level 0.
        """
        assert self._database is not None
        try:
            with translated("cannot flush the store", self._directory):
                self._database.flush()
                return self._database.property_int_value("rocksdb.num-files-at-level0") or 0
        finally:
            self.close()

    def close(self) -> None:
        """Close without flushing. Idempotent."""
        database, self._database = self._database, None
        if database is not None:
            close_database(database, self._directory)


@contextmanager
def bulk_load(directory: Path, options: Mapping[str, object], *, continued: bool = False) -> Iterator[BulkWriter]:
    """Fill a new store fast: with unsorted memtables, without a write-ahead log, and compacting only very many files.

    The block writes. When it ends without an error, the directory has a finished, closed store.

    Args:
        continued: the directory has what an earlier bulk load, which was killed, had written when it last flushed, and
            perhaps more.

    Raises: DiskFull, CorruptError, InvalidError.
    """
    with os_translated("cannot make the store", directory):
        directory.mkdir(parents=True, exist_ok=True)
        if not continued and os.listdir(directory):
            raise InvalidError("a bulk load needs an empty directory", path=directory)
    writer = BulkWriter(open_database(directory, rocksdb_options.bulk(options)), directory)
    try:
        yield writer
        files = writer.finish()
    finally:
        writer.close()
    if files <= LEVEL0_LIMIT:
        return
    store = RocksDbStore.open(directory, options)
    try:
        store.compact()
        store.flush()
    finally:
        store.close()
