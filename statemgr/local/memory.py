"""A local store in memory, for small state and for tests. Touches its own directory and checkpoint targets.

A flush writes the whole content as one change segment.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock

from statemgr.errors import ClosedError, CorruptBlob, CorruptFile, InvalidError
from statemgr.local import durable
from statemgr.model.commit import Change
from statemgr.model.segment import read_segment, write_segment
from statemgr.os_errors import translated

FILE = "memory.segment"


class MemoryStore:
    """Implements ``ports.LocalStore``. Safe to read, flush and checkpoint from other threads than the writing one."""

    def __init__(self, directory: Path, content: dict[bytes, bytes]) -> None:
        self._directory = directory
        self._file = threading.RLock()
        #: Held while the content and its number change. No I/O happens meanwhile, so a simulation need not see it.
        self._applying = Lock()
        self._content: dict[bytes, bytes] | None = content
        self._keys: list[bytes] | None = None
        self._sequence_number = len(content)
        self._flushed_at = self._sequence_number if content else -1

    @classmethod
    def open(cls, directory: Path) -> MemoryStore:
        """Open a store; an empty or missing directory becomes a new one.

        Raises: CorruptError (also for a directory with files but no content file), DiskFull, AccessDenied.
        """
        path = directory / FILE
        with translated("cannot open the store", directory):
            directory.mkdir(parents=True, exist_ok=True)
            if not os.listdir(directory):
                return cls(directory, {})
            if not path.is_file():
                raise CorruptFile(
                    f"the directory has files but no {FILE}: it is not a store in memory",
                    hint="remove the directory: the store is then restored",
                    path=directory,
                )
            with durable.open_file(path) as file:
                try:
                    content = {key: value for key, value in read_segment(file) if value is not None}
                except CorruptBlob as error:
                    raise CorruptFile(
                        error.message, hint="remove the directory: the store is then restored", path=path
                    ) from error
        store = cls(directory, content)
        store._flushed_at = store._sequence_number
        return store

    @property
    def closed(self) -> bool:
        return self._content is None

    @property
    def _items(self) -> dict[bytes, bytes]:
        if self._content is None:
            raise ClosedError("the store is closed", path=self._directory)
        return self._content

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None. Raises: ClosedError."""
        return self._items.get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values in the order of the keys. Raises: ClosedError."""
        return [self._items.get(key) for key in keys]

    def write(self, changes: Iterable[Change]) -> None:
        """Raises: InvalidError (not bytes; nothing was applied), ClosedError."""
        content = self._items
        pending = list(changes)
        for key, value in pending:
            if not isinstance(key, bytes) or not isinstance(value, bytes | None):
                raise InvalidError("cannot write", hint="pass bytes as keys and values", path=self._directory)
        with self._applying:
            for key, value in pending:
                if value is None:
                    if content.pop(key, None) is not None:
                        self._keys = None
                else:
                    if key not in content:
                        self._keys = None
                    content[key] = value
            self._sequence_number += len(pending)

    def ingest(self, tables: Sequence[Path]) -> None:
        """Raises: InvalidError, always: only stores of another type have tables."""
        raise InvalidError(
            "a store in memory takes no tables", hint="set stores.<name>.type to rocksdb", path=self._directory
        )

    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        """Raises: ClosedError."""
        self.write([(key, None) for key in self._keys_in(start, end)])

    def scan(self, start: bytes | None, end: bytes | None) -> MemoryScan:
        """Raises: ClosedError."""
        content = self._items
        return MemoryScan(self, [(key, content[key]) for key in self._keys_in(start, end)])

    def _keys_in(self, start: bytes | None, end: bytes | None) -> list[bytes]:
        content = self._items
        if self._keys is None:
            self._keys = sorted(content)
        first = 0 if start is None else bisect_left(self._keys, start)
        last = len(self._keys) if end is None else bisect_left(self._keys, end)
        return self._keys[first:last]

    @property
    def sequence_number(self) -> int:
        if self._content is None:
            raise ClosedError("the store is closed", path=self._directory)
        return self._sequence_number

    def flush(self) -> None:
        """Raises: DiskFull; then nothing is lost."""
        with self._file:
            self._write_file()

    def final_tables(self, share: float) -> Sequence[tuple[str, int]]:
        """None: each flush writes the only file again."""
        return ()

    def _write_file(self) -> None:
        with self._applying:
            number = self.sequence_number
            if number == self._flushed_at:
                return
            content = self._items.copy()
        path = self._directory / FILE
        temporary = path.with_name(FILE + ".tmp")
        with translated("cannot flush the store", self._directory):
            try:
                temporary.unlink(missing_ok=True)
                with durable.create(temporary) as file:
                    write_segment(sorted(content.items()), file)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        self._flushed_at = number

    def gauge(self, name: str) -> None:
        """None: to count its bytes, another thread would read what the owner changes."""

    def statistics(self) -> Mapping[str, float]:
        """Keys, and bytes of keys and values. Raises: ClosedError."""
        content = self._items
        size = sum(len(key) + len(value) for key, value in content.items())
        return {"memory.keys": len(content), "memory.bytes": size}

    def compact_if_needed(self, limit: int) -> bool:
        """Nothing to do."""
        return False

    def checkpoint(self, directory: Path) -> None:
        """Raises: DiskFull, InvalidError if the directory exists."""
        if os.path.lexists(directory):
            raise InvalidError("the directory of a checkpoint already exists", path=directory)
        with self._file:
            self.flush()
            with translated("cannot make a checkpoint of the store", directory):
                os.mkdir(directory)
                durable.link_or_copy(self._directory / FILE, directory / FILE)

    def concurrent_checkpoint(self, directory: Path) -> None:
        """Raises: DiskFull, InvalidError if the directory exists."""
        self.checkpoint(directory)

    def close(self) -> None:
        """Close without flushing. Idempotent."""
        self._content = None
        self._keys = None


class MemoryScan(Iterator[tuple[bytes, bytes]]):
    """The items at the time of the call. Closing the scan, or its store, ends it."""

    def __init__(self, store: MemoryStore, items: list[tuple[bytes, bytes]]) -> None:
        self._store = store
        self._items: Iterator[tuple[bytes, bytes]] | None = iter(items)
        self._closed = False

    def __next__(self) -> tuple[bytes, bytes]:
        if self._closed or (self._items is not None and self._store.closed):
            raise ClosedError("the scan was closed, by itself or with its store")
        for item in self._items or ():
            return item
        self._items = None
        raise StopIteration

    def close(self) -> None:
        """End the scan early: its next step raises ClosedError."""
        if self._items is not None:
            self._items = None
            self._closed = True
