"""Many small cases in one query: a case is a name, what it does for a key, and the rows of its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.spark.processors import Batches, Comparison

INPUT = "`case` string, id string, n bigint, t timestamp"
OUTPUT = "`case` string, id string, seen string"
#: The rows of one batch: an ID and a number, or an ID, a number and a second of 2024-01-01.
Rows = Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """``act`` is called for each key and batch; its arguments depend on the kind of case."""

    act: Callable[..., Any]
    batches: Sequence[Rows]
    #: What a processor declares for the case, and what it does when a timer expires.
    declare: Callable[[Any], Any] = lambda handle: None
    expire: Callable[..., Any] = lambda *_: None


def put(comparison: Comparison, cases: Mapping[str, Case]) -> None:
    """Put the rows of all cases on the topic, so that each of Spark's batches has the rows of one batch of each."""
    count = max(len(case.batches) for case in cases.values())
    batches: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    for name, case in cases.items():
        for i, rows in enumerate(case.batches):
            batches[i] += [
                {"case": name, "id": row[0], "n": row[1]} | ({"t": second(row[2])} if len(row) > 2 else {})
                for row in rows
            ]
    comparison.rows_per_batch = max(map(len, batches))
    for rows in batches:
        filler = [{"case": "filler", "id": "f", "n": 0}] * (comparison.rows_per_batch - len(rows))
        comparison.produce([*rows, *filler])


def second(number: float) -> str:
    """A time of the first day of 2024."""
    return f"2024-01-01T00:{int(number // 60):02}:{number % 60:06.3f}Z"


def different(found: Batches, expected: Batches, cases: Mapping[str, Case]) -> dict[str, Any]:
    """Case → what both engines gave, for the cases whose rows differ in a batch."""

    def of(name: str, batches: Batches) -> Batches:
        return [[row for row in batch if row[0] == name] for batch in batches]

    seen = {row[0] for batch in found for row in batch}
    assert seen >= set(cases), f"cases without rows: {sorted(set(cases) - seen)}"
    pairs = {name: (of(name, found), of(name, expected)) for name in cases}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    for name, (ours, theirs) in differing.items():
        for i in range(max(len(ours), len(theirs))):
            print(name, i, ours[i : i + 1], "on Spark:", theirs[i : i + 1])
    return differing
