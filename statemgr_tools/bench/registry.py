"""Every case by its name. A case is a function that measures and yields lines. Imports register the cases."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statemgr_tools.bench.result import Line
    from statemgr_tools.bench.session import Session

Measure = Callable[["Session"], Iterator["Line"]]
#: Case → (its module, whether its target must be reached), in the order of the table.
TABLE = {
    "restore-file": ("restore", False),
    "restore-s3": ("restore", False),
    "commit-s3": ("commit", False),
    "commit-idle": ("commit", True),
    "backup-s3": ("restore", False),
    "peak-memory": ("memory", True),
    "restore-partial": ("partial", True),
    "first-answer": ("first_answer", False),
    "first-second": ("first_answer", False),
    "store-get": ("first_answer", False),
    "commit-vs-state": ("segments", True),
    "commit-bytes": ("segments", True),
    "commit-bytes-200": ("segments", False),
    "commit-requests": ("segments", True),
    "restore-segments": ("segments", False),
    "commit-tail": ("tail", False),
    "restore-changelog": ("changelog", False),
    "materialize": ("materialize", False),
    "commit-changelog": ("changelog", False),
    "blob-vs-changelog": ("changelog", False),
    "adopt": ("changelog", False),
    "verify": ("verify", False),
    "rescale": ("rescale", False),
    "store-calls": ("store", False),
    "open-job": ("open", False),
    "many-tasks": ("many_tasks", False),
    "rollback": ("rollback", False),
    "spark-read": ("spark_read", False),
    "spark-vectorised": ("spark", False),
    "spark-large": ("spark", False),
    "spark-grow": ("spark", False),
    "spark-processor": ("spark", False),
    "spark-200": ("spark", False),
    "spark-restart": ("spark", False),
    "spark-location": ("spark", False),
    "spark-affinity": ("spark", False),
    "spark-many": ("spark", False),
}
#: Case → names of lines that it measures besides its own.
_MORE = {"first-answer": ("get-by-need", "time-to-whole")}
_measures: dict[str, Measure] = {}


@dataclass(frozen=True, slots=True)
class Case:
    """A case: its name, its measuring function, and whether its target must be reached."""

    name: str
    measure: Measure
    must: bool


def line_names() -> list[str]:
    """Return the names of all lines of the table, in their order."""
    return [line for name in TABLE for line in (name, *_MORE.get(name, ()))]


def case(name: str) -> Callable[[Measure], Measure]:
    """Register the function that measures a case of the table."""

    def register(measure: Measure) -> Measure:
        assert name in TABLE, name
        assert name not in _measures, name
        _measures[name] = measure
        return measure

    return register


def find(name: str) -> Case:
    """Return a case by its name. Raises: KeyError."""
    module, must = TABLE[name]
    importlib.import_module(f"statemgr_tools.bench.cases.{module}")
    return Case(name, _measures[name], must)
