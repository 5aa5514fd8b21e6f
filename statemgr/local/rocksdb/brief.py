"""A RocksDB store that is open for a moment, as an attempt's are: nobody waits until it is open for writing.

Opening for writing writes and syncs five small files. So the database is open for reading at first, and changes stay in
memory until they are many, a scan needs their order, or they have to be in files. Often that is when an attempt ends,
and other work goes on. The changes of an attempt that fails are never written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rocksdict import Rdict

from statemgr.errors import RetryableError
from statemgr.local.rocksdb.handle import Scan, batch_of, in_key_order
from statemgr.local.rocksdb.store import RocksDbStore
from statemgr.model.commit import Change, are_all, size_of

#: Most bytes of keys and values that stay in memory.
_BYTES = 4 * 1024 * 1024


class BriefStore(RocksDbStore):
    """Implements ``ports.LocalStore`` for one thread. Open it with ``read_first``."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        #: Changes that the database does not have, their bytes, and how many were made.
        self._late: dict[bytes, bytes | None] = {}
        self._late_bytes = self._late_count = 0
        self._changing = threading.RLock()

    @property
    def _writable(self) -> Rdict:
        """The database, opened for writing, with all changes."""
        with self._changing:
            database = super()._writable
            if self._late:
                database.write(batch_of(in_key_order(self._late.items())), self._write_options)
                self._numbers_skipped += self._late_count - len(self._late)  # the database counts a key once
                self._late, self._late_bytes, self._late_count = {}, 0, 0
            return database

    def get(self, key: bytes) -> bytes | None:
        late = self._late
        return late[key] if key in late else super().get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        late = self._late
        found = super().get_many(keys)
        return [late.get(key, value) for key, value in zip(keys, found, strict=True)] if late else found

    def write(self, changes: Iterable[Change]) -> None:
        if self._reads_only:
            new = dict(changes)
            if self._keep(new):
                return
            changes = new.items()
        super().write(changes)

    def _keep(self, new: dict[bytes, bytes | None]) -> bool:
        """Keep changes in memory if they are few. Returns: whether it does."""
        if not (are_all(bytes, new) and are_all(bytes | None, new.values())):
            return False
        size = size_of(new)
        with self._changing:
            if not self._reads_only or self._late_bytes + size > _BYTES:
                return False
            self._late |= new
            self._late_bytes += size
            self._late_count += len(new)
            return True

    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        self._write_late("cannot delete a range")
        super().delete_range(start, end)

    def scan(self, start: bytes | None, end: bytes | None) -> Scan:
        self._write_late("cannot scan")
        return super().scan(start, end)

    @property
    def sequence_number(self) -> int:
        return super().sequence_number + self._late_count

    def flush(self) -> None:
        self._write_late("cannot flush the store")
        super().flush()

    def statistics(self) -> Mapping[str, float]:
        found = dict(super().statistics())
        found["rocksdb.estimate-num-keys"] += len(self._late)  # as it counts a memtable
        return found

    def concurrent_checkpoint(self, directory: Path) -> None:
        """Raises: RetryableError, because only the owner's thread opens the store for writing."""
        if self._late:
            raise RetryableError("the store has changes that are not in its files yet", path=self._directory)
        super().concurrent_checkpoint(directory)

    def close(self) -> None:
        self._late = {}
        super().close()

    def _write_late(self, what: str) -> None:
        if self._late:
            with self._writing(what):
                self._writable  # noqa: B018 - a step, not a value
