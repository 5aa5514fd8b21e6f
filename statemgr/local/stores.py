"""Opens local stores by the name of their type in the configuration (``rocksdb``, ``memory``)."""

from __future__ import annotations

from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from statemgr.errors import ConfigError, CorruptFile, InvalidError
from statemgr.local.memory import FILE, MemoryStore
from statemgr.local.rocksdb.brief import BriefStore
from statemgr.local.rocksdb.bulk import bulk_load
from statemgr.local.rocksdb.options import BRIEF
from statemgr.local.rocksdb.split import in_batches, scan_in_batches
from statemgr.local.rocksdb.store import RocksDbStore
from statemgr.model.commit import Change
from statemgr.ports import Items, LocalStore


class ChangeWriter(Protocol):
    """Takes any number of changes, in order."""

    def write(self, changes: Iterable[Change]) -> None: ...

    def flush(self) -> None:
        """Write everything to files."""


class NewStoreWriter(ChangeWriter, Protocol):
    """Fills a new store."""

    def final_tables(self, share: float) -> Sequence[tuple[str, int]]:
        """Names and bytes of files that nothing will rewrite, when ``share`` of all changes was written."""


def type_of(files: Container[str]) -> str | None:
    """The type of the store whose directory has these files; None if it has none."""
    return "memory" if FILE in files else "rocksdb" if "CURRENT" in files else None


def open_store(
    kind: str, directory: Path, options: Mapping[str, object], *, read_first: bool = False, briefly: bool = False
) -> LocalStore:
    """Open a store; an empty or missing directory becomes a new one.

    Args:
        options: names after ``stores.<name>.rocksdb.``.
        read_first: open the database for reading only, until the first write.
        briefly: start no compaction unless asked, because the close of the store would interrupt it. With
            ``read_first``, the first writes stay in memory.

    Raises: CorruptError, InvalidError (open elsewhere), DiskFull, AccessDenied, ConfigError (unknown kind).
    """
    if kind == "rocksdb":
        if briefly:
            options = {**options, BRIEF: True}
        store = BriefStore if briefly and read_first else RocksDbStore
        return store.open(directory, options, read_first=read_first)
    if kind == "memory":
        return MemoryStore.open(directory)
    raise _unknown(kind)


def open_snapshot(kind: str, directory: Path, options: Mapping[str, object]) -> LocalStore:
    """Open a finished directory for reading only. It may be open elsewhere, and does not change.

    Raises: CorruptError (also if there is no store), AccessDenied, ConfigError (unknown kind).
    """
    if kind == "rocksdb":
        return ReadOnlyStore(RocksDbStore.open_snapshot(directory, options), directory)
    if kind == "memory":
        if not (directory / FILE).is_file():
            raise CorruptFile("the directory has no snapshot of a store in memory", path=directory)
        return ReadOnlyStore(MemoryStore.open(directory), directory)
    raise _unknown(kind)


def snapshot_batches(
    kind: str, directory: Path, options: Mapping[str, object], start: bytes | None, end: bytes | None, size: int
) -> Generator[list[tuple[bytes, bytes]]]:
    """The items of a finished directory with ``start`` ≤ key < ``end``, in key order, in lists of up to ``size``, or of
    about 16 MiB.

    Raises: as :func:`open_snapshot`.
    """
    if kind == "rocksdb":
        yield from scan_in_batches(directory, options, start, end, size)
        return
    opened = open_snapshot(kind, directory, options)
    try:
        yield from in_batches(opened.scan(start, end), size)
    finally:
        opened.close()


def key_ranges(kind: str, directory: Path, count: int) -> list[tuple[bytes | None, bytes | None]]:
    """Splits the keys of a finished directory into at most ``count`` ranges of about equal size.

    None is an open end. Raises: as :func:`open_snapshot`.
    """
    starts = sorted(RocksDbStore.file_starts(directory)) if kind == "rocksdb" else []
    inner = sorted({starts[len(starts) * part // count] for part in range(1, count)}) if len(starts) > 1 else []
    bounds = [None, *inner, None]
    return list(pairwise(bounds))


def bulk_writer(
    kind: str, directory: Path, options: Mapping[str, object], *, continued: bool = False
) -> AbstractContextManager[NewStoreWriter]:
    """Fill a new store. When the block ends without an error, the directory has the closed store.

    ``continued``: it begins with what an earlier writer, which was killed, had written when it last flushed, and
    perhaps with more. Raises: as :func:`open_store`; InvalidError if the directory is not empty and not continued.
    """
    if kind == "rocksdb":
        return bulk_load(directory, options, continued=continued)
    if kind == "memory":
        return _memory_load(directory)
    raise _unknown(kind)


@contextmanager
def _memory_load(directory: Path) -> Iterator[MemoryStore]:
    store = MemoryStore.open(directory)
    try:
        yield store
        store.flush()
    finally:
        store.close()


def _unknown(kind: str) -> ConfigError:
    return ConfigError(f"there is no local store of the type {kind!r}", hint="use rocksdb or memory")


class ReadOnlyStore:
    """Implements ``ports.LocalStore`` for a finished snapshot. Everything that would write raises InvalidError."""

    def __init__(self, store: LocalStore, directory: Path) -> None:
        self._store = store
        self._directory = directory

    def get(self, key: bytes) -> bytes | None:
        return self._store.get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._store.get_many(keys)

    def scan(self, start: bytes | None, end: bytes | None) -> Items:
        return self._store.scan(start, end)

    def gauge(self, name: str) -> int | None:
        return self._store.gauge(name)

    def statistics(self) -> Mapping[str, float]:
        return self._store.statistics()

    @property
    def sequence_number(self) -> int:
        return self._store.sequence_number

    def write(self, changes: Iterable[Change]) -> None:
        raise self._refused()

    def ingest(self, tables: Sequence[Path]) -> None:
        raise self._refused()

    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        raise self._refused()

    def flush(self) -> None:
        pass

    def compact_if_needed(self, limit: int) -> bool:
        return False

    def checkpoint(self, directory: Path) -> None:
        raise self._refused()

    def concurrent_checkpoint(self, directory: Path) -> None:
        raise self._refused()

    def close(self) -> None:
        self._store.close()

    def _refused(self) -> InvalidError:
        return InvalidError(
            "the store is a snapshot and can only be read", hint="open a copy of it to write", path=self._directory
        )
