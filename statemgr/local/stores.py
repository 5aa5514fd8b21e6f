"""The kinds of local store, by the name that the configuration gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from statemgr.errors import ConfigError, CorruptFile
from statemgr.local.memory import FILE, MemoryStore
from statemgr.local.read_only import ReadOnlyStore
from statemgr.local.rocksdb.bulk import bulk_load
from statemgr.local.rocksdb.options import BRIEF
from statemgr.local.rocksdb.store import RocksDbStore
from statemgr.model.commit import Change
from statemgr.ports import LocalStore


class ChangeWriter(Protocol):
    """Takes changes in order, any number of them."""

    def write(self, changes: Iterable[Change]) -> None: ...


def open_store(
    kind: str, directory: Path, options: Mapping[str, object], *, read_first: bool = False, briefly: bool = False
) -> LocalStore:
    """Open a store of a kind (``rocksdb``, ``memory``); an empty or missing directory becomes a new one.

    Args:
        options: names after ``stores.<name>.rocksdb.``.
        read_first: what only writing needs, and what waits for a busy disk, is put off until the first write.
        briefly: nothing is compacted before it is asked for: the end of the store would cut it off.

    Raises: CorruptError, InvalidError (open elsewhere), DiskFull, AccessDenied, ConfigError (unknown kind).
    """
    if kind == "rocksdb":
        if briefly:
            options = {**options, BRIEF: True}
        return RocksDbStore.open(directory, options, read_first=read_first)
    if kind == "memory":
        return MemoryStore.open(directory)
    raise _unknown(kind)


def open_snapshot(kind: str, directory: Path, options: Mapping[str, object]) -> LocalStore:
    """Open a finished directory of a kind for reading only: it may be open elsewhere, and its state stays as it is.

    Raises: CorruptError (also when there is no store), AccessDenied, ConfigError (unknown kind).
    """
    if kind == "rocksdb":
        return ReadOnlyStore(RocksDbStore.open_snapshot(directory, options), directory)
    if kind == "memory":
        if not (directory / FILE).is_file():
            raise CorruptFile("the directory holds no snapshot of a store in memory", path=directory)
        return ReadOnlyStore(MemoryStore.open(directory), directory)
    raise _unknown(kind)


def bulk_writer(kind: str, directory: Path, options: Mapping[str, object]) -> AbstractContextManager[ChangeWriter]:
    """Fill a new store of a kind; when the block ends without an error, the directory holds it, closed.

    Raises: as :func:`open_store`; InvalidError when the directory is not empty.
    """
    if kind == "rocksdb":
        return bulk_load(directory, options)
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
    return ConfigError(f"no local store is of the type {kind!r}", hint="it is rocksdb or memory")
