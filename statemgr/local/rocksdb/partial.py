"""A RocksDB store whose table files have holes, which are filled when something reads them.

A table file with holes has its full size. RocksDB verifies each block that it reads, and a hole reads as zeros, which
no block's checksum allows. The error names the file, the offset and the size of the block. So the range is supplied,
and the call repeated. A filter that cannot be read is no error for RocksDB: it then looks into the blocks of data.

Compaction would read everything, so the store begins none until all files are whole. Until then its directory is
private, and nothing can be made from it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rocksdict import Rdict

from statemgr.errors import CorruptFile, RetryableError
from statemgr.local.rocksdb.handle import Scan, is_unreadable, translated
from statemgr.local.rocksdb.options import BRIEF
from statemgr.local.rocksdb.store import RocksDbStore
from statemgr.ports import Items

T = TypeVar("T")

#: How often a scan looks for the same block in RocksDB's cache.
_CACHED_TRIES = 5

_BLOCK = re.compile(r"([^/\\\s]+\.sst) offset (\d+) size (\d+)")
_TABLE = re.compile(r"([^/\\\s]+\.sst)")


@dataclass(frozen=True, slots=True)
class Hole:
    """What could not be read: a block of a table file (bytes from ``offset`` on), or something in it (without a size),
    or something in any file (without a name)."""

    table: str = ""
    offset: int = 0
    size: int = 0


#: Supplies what could not be read, for the given time in one call. Returns: whether it may be there now.
Supply = Callable[[Hole, int], bool]


class PartialStore(RocksDbStore):
    """Implements ``ports.LocalStore``. One thread writes; others read."""

    supply: Supply
    threads: Callable[[], Executor]
    is_whole = False

    @classmethod
    def open_partial(
        cls, directory: Path, options: Mapping[str, object], supply: Supply, threads: Callable[[], Executor]
    ) -> PartialStore:
        """``threads``: makes a pool, for the reads of many keys. Raises: as :meth:`RocksDbStore.open`, and what
        ``supply`` raises."""
        store = _repeated(supply, lambda: cls.open(directory, {**options, BRIEF: True}))
        store.supply, store.threads = supply, threads
        return store

    def get(self, key: bytes) -> bytes | None:
        read = super().get
        return _repeated(self.supply, lambda: read(key))

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        try:
            return super().get_many(keys)
        except CorruptFile:
            with self.threads() as threads:  # what they miss comes in parallel
                return list(threads.map(self.get, keys))

    def scan(self, start: bytes | None, end: bytes | None) -> Items:  # type: ignore[override]
        """Reads lazily. Raises: as :meth:`RocksDbStore.scan`, and what ``supply`` raises; the next step tries again."""
        with translated("cannot scan", self._directory):
            scan = PartialScan(self._db, start, end, self._directory, self.supply)
        self._scans.add(scan)  # type: ignore[arg-type]
        return scan

    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        delete = super().delete_range  # without an end, it looks for the last key
        _repeated(self.supply, lambda: delete(start, end))

    def ingest(self, tables: Sequence[Path]) -> None:
        take = super().ingest  # it looks for keys in the range of the new tables
        _repeated(self.supply, lambda: take(tables))

    def branch(self, directory: Path) -> PartialStore:
        """Open another store with the content of now, in a directory that does not exist. Its table files are those of
        this store, with the same holes. Raises: as :meth:`open_partial`."""
        super().concurrent_checkpoint(directory)
        return self.open_partial(directory, self._values, self.supply, self.threads)

    def become_whole(self, *, briefly: bool = False) -> None:
        """All files are here and verified: from now on this is a store as any other, or one that is opened briefly.

        Raises: ClosedError.
        """
        if briefly:
            self.is_whole = True
            return
        self._values = {name: value for name, value in self._values.items() if name != BRIEF}
        self.is_whole = True
        if self._stuck:  # it is opened again with these options
            return
        self._catch_up(self._db, begins=True)

    def compact_if_needed(self, limit: int) -> bool:
        return self.is_whole and super().compact_if_needed(limit)

    def compact(self) -> None:
        self._check_whole()
        super().compact()

    def checkpoint(self, directory: Path) -> None:
        self._check_whole()
        super().checkpoint(directory)

    def concurrent_checkpoint(self, directory: Path) -> None:
        self._check_whole()
        super().concurrent_checkpoint(directory)

    def _check_whole(self) -> None:
        if not self.is_whole:
            raise RetryableError(
                "parts of the store's files are not here yet",
                hint="try again when they are, or restore the store as a whole", path=self._directory,
            )  # fmt: skip

    def _recover(self) -> None:
        if self._stuck is not None and not self.is_whole:  # it would read everything
            raise type(self._stuck)(
                f"{self._stuck.message}; writes wait until all of the store's files are here",
                hint=self._stuck.hint, **self._stuck.where,
            )  # fmt: skip
        super()._recover()


class PartialScan(Iterator[tuple[bytes, bytes]]):
    """Items with ``start`` ≤ key < ``end`` at the time of the call, whatever is written between two holes.

    The buffers of a RocksDB iterator may have the zeros of other holes, so after a hole there is a new one. If
    something was written since the call, only the first iterator knows what there was before. Then another one reads
    the block into RocksDB's cache, where the first one finds it.
    """

    def __init__(
        self, database: Rdict, start: bytes | None, end: bytes | None, directory: Path, supply: Supply
    ) -> None:
        self._database: Rdict | None = database
        self._number = database.latest_sequence_number()
        self._start, self._end, self._directory, self._supply = start, end, directory, supply
        self._tried = Counter[Hole]()
        self._scan = self._new(database)

    def _new(self, database: Rdict) -> Scan:
        return Scan(database, self._start, self._end, self._directory)

    def __next__(self) -> tuple[bytes, bytes]:
        while True:
            try:
                item = next(self._scan)
            except StopIteration:
                self._database = None
                raise
            except CorruptFile as error:
                self._go_on(error)
                continue
            self._tried.clear()
            self._start = item[0] + b"\0"
            return item

    def _go_on(self, error: CorruptFile) -> None:
        database = self._database
        if database is None:
            return  # it was closed: the next step says so
        if is_unreadable(error.message):
            raise error
        if database.latest_sequence_number() == self._number:
            _supplied(self._supply, error, self._tried)
            self._scan = self._new(database)
            return
        hole = hole_in(error.message)
        self._tried[hole] += 1
        if self._tried[hole] > _CACHED_TRIES:
            raise RetryableError(
                "the store was written to during a scan of what is not here yet", path=self._directory,
                hint="scan again, or gather the changes and write them after the scan",
            ) from error  # fmt: skip
        if not self._supply(hole, 1):  # its own error may be of before: the other iterator tells what is damaged
            raise error
        _repeated(self._supply, lambda: next(self._new(database), None))
        self._scan.seek_again(self._start)

    def close(self) -> None:
        """End the scan early, and release the database: the next step raises ClosedError."""
        self._database = None
        self._scan.close()


def _repeated(supply: Supply, call: Callable[[], T]) -> T:
    tried = Counter[Hole]()
    while True:
        try:
            return call()
        except CorruptFile as error:
            _supplied(supply, error, tried)


def _supplied(supply: Supply, error: CorruptFile, tried: Counter[Hole]) -> None:
    """Raises: the error if nothing can be supplied."""
    hole = hole_in(error.message)
    tried[hole] += 1
    if is_unreadable(error.message) or not supply(hole, tried[hole]):
        raise error


def hole_in(text: str) -> Hole:
    """What RocksDB could not read, by the text of its error."""
    if block := _BLOCK.search(text):
        return Hole(block[1], int(block[2]), int(block[3]))
    table = _TABLE.search(text)
    return Hole(table[1]) if table else Hole()
