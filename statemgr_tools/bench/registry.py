"""Every case by its name. A case is a function that measures and yields lines; importing a family registers it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statemgr_tools.bench.result import Line

if TYPE_CHECKING:
    from statemgr_tools.bench.session import Session

Measure = Callable[["Session"], Iterator[Line]]
#: Case → (module that has it, whether it must be reached), in the order of the table.
TABLE = {
    "restore-file": ("cases_restore", False),
    "restore-s3": ("cases_restore", False),
    "commit-s3": ("cases_commit", False),
    "commit-idle": ("cases_commit", True),
    "backup-s3": ("cases_restore", False),
    "peak-memory": ("cases_memory", True),
    "restore-partial": ("cases_partial", True),
    "commit-vs-state": ("cases_segments", True),
    "commit-bytes": ("cases_segments", True),
    "commit-bytes-200": ("cases_segments", False),
    "commit-requests": ("cases_segments", True),
    "commit-tail": ("cases_tail", False),
    "restore-changelog": ("cases_changelog", False),
    "commit-changelog": ("cases_changelog", False),
    "blob-vs-changelog": ("cases_changelog", False),
    "store-calls": ("cases_store", False),
    "open-job": ("cases_open", False),
}
_measures: dict[str, Measure] = {}


@dataclass(frozen=True, slots=True)
class Case:
    """A case: its name, what measures it, and whether it must be reached."""

    name: str
    measure: Measure
    must: bool


def case(name: str) -> Callable[[Measure], Measure]:
    """Register the function that measures a case of the table."""

    def register(measure: Measure) -> Measure:
        assert name in TABLE, name
        assert name not in _measures, name
        _measures[name] = measure
        return measure

    return register


def find(name: str) -> Case:
    """A case by its name. Raises: KeyError."""
    module, must = TABLE[name]
    importlib.import_module(f"statemgr_tools.bench.{module}")
    return Case(name, _measures[name], must)
