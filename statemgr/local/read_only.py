"""Makes a local store read-only, so that a finished snapshot directory stays as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from statemgr.errors import InvalidError
from statemgr.model.commit import Change
from statemgr.ports import Items, LocalStore


class ReadOnlyStore:
    """Implements ``ports.LocalStore``: passes reads on to ``store``. Everything that would write raises
    InvalidError."""

    def __init__(self, store: LocalStore, directory: Path) -> None:
        self._store = store
        self._directory = directory

    def get(self, key: bytes) -> bytes | None:
        return self._store.get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._store.get_many(keys)

    def scan(self, start: bytes | None, end: bytes | None) -> Items:
        return self._store.scan(start, end)

    def statistics(self) -> Mapping[str, float]:
        return self._store.statistics()

    @property
    def sequence_number(self) -> int:
        """Constant, because nothing writes."""
        return self._store.sequence_number

    def write(self, changes: Iterable[Change]) -> None:
        """Raises: InvalidError."""
        raise self._refused()

    def ingest(self, tables: Sequence[Path]) -> None:
        """Raises: InvalidError."""
        raise self._refused()

    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        """Raises: InvalidError."""
        raise self._refused()

    def flush(self) -> None:
        """Nothing to do."""

    def compact_if_needed(self, limit: int) -> bool:
        """Nothing to do."""
        return False

    def checkpoint(self, directory: Path) -> None:
        """Raises: InvalidError."""
        raise self._refused()

    def checkpoint_beside(self, directory: Path) -> None:
        """Raises: InvalidError."""
        raise self._refused()

    def close(self) -> None:
        self._store.close()

    def _refused(self) -> InvalidError:
        return InvalidError(
            "the store is a snapshot and can only be read", hint="open a copy of it to write", path=self._directory
        )
