"""RocksDB table files of changes: one entry per key, its newest change. Touches only the paths that it is given.

A database can ingest such a file without rewriting it, which costs far less than writing each change.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rocksdict import IngestExternalFileOptions, Rdict, SstFileWriter

from statemgr.errors import CorruptError
from statemgr.local.rocksdb import options as rocksdb_options
from statemgr.local.rocksdb.handle import Scan, close_database, in_key_order, open_database, translated
from statemgr.model.commit import Change


def write_table(path: Path, changes: Iterable[Change], options: Mapping[str, object]) -> list[bytes]:
    """Make a new table of at least one change. All of its keys are in memory meanwhile.

    Returns: the keys that it deletes.

    Args:
        options: names after ``stores.<name>.rocksdb.``; they decide on blocks and filters, but not on compression.

    Raises: DiskFull, InvalidError (a key is not bytes), RetryableError.
    """
    with translated("cannot write a table of changes", path):
        writer = SstFileWriter(rocksdb_options.uncompressed(options))
        writer.open(str(path))
        put, delete = writer.__setitem__, writer.__delitem__
        deleted: list[bytes] = []
        for key, value in in_key_order(changes):
            if value is None:
                delete(key)
                deleted.append(key)
            else:
                put(key, value)
        writer.finish()
    return deleted


def ingest(database: Rdict, tables: Sequence[Path]) -> None:
    """Add tables to a database, all or none, the oldest first. RocksDB moves the files, and may write to them."""
    options = IngestExternalFileOptions()
    options.set_move_files(True)
    database.ingest_external_file([str(path) for path in tables], options)


def is_readable(table: Path) -> bool:
    """Whether RocksDB can ingest a table and read it to its end. Raises: DiskFull, RetryableError."""
    try:
        for _ in puts_of(table):
            pass
    except CorruptError:
        return False
    return True


def puts_of(table: Path) -> Iterator[tuple[bytes, bytes]]:
    """The keys of a table that have a value, and their values. The table stays.

    It is read in a temporary database next to it. Raises: CorruptError, DiskFull, RetryableError.
    """
    directory = table.with_name(f"{table.name}.read")
    try:
        database = open_database(directory, rocksdb_options.uncompressed({}))
        try:
            with translated("cannot read a table of changes", table):
                database.ingest_external_file([str(table)])
            scan = Scan(database, None, None, directory)
            try:
                yield from scan
            finally:
                scan.close()
        finally:
            close_database(database, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
