"""In-memory change sets, for testing the code that backs them up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from statemgr.model.commit import Change


@dataclass(frozen=True, slots=True)
class ChangeList:
    """A change set in memory."""

    changes: tuple[Change, ...] = ()

    @property
    def count(self) -> int:
        return len(self.changes)

    @property
    def size(self) -> int:
        return sum(len(key) + len(value or b"") for key, value in self.changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)
