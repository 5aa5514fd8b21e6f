"""Compares the job's state in each backend, and all its output, with the recount."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from statemgr import JobConfig, StateManager
from statemgr.engine import open_attempt
from statemgr_tools.demo.measures import EXACT, Tally
from statemgr_tools.demo.pipeline import PARTITIONER, STORE
from statemgr_tools.demo.recount import Count

_SHORT = {"kafka-changelog": "changelog", "blob-store": "blob"}

Plain = tuple[object, ...]


@dataclass(frozen=True)
class Side:
    """One side of the comparison: its name, and key → tally in a comparable form."""

    name: str
    tallies: Mapping[bytes, Plain]

    def total(self) -> tuple[int, int, int, tuple[int, ...], tuple[Decimal, ...], tuple[Decimal | None, ...]]:
        """The number of keys, rows and unparsable rows, and for each measure the missing values, sum and maximum."""
        rows = unparsable = 0
        missing: list[int] = []
        sums: list[Decimal] = []
        largest: list[Decimal | None] = []
        for tally in self.tallies.values():
            r, u, m, s, top = tally
            assert isinstance(r, int)
            assert isinstance(u, int)
            rows, unparsable = rows + r, unparsable + u
            missing = _added(missing, m)
            sums = _exactly_added(sums, s)
            largest = _largest(largest, top)
        return len(self.tallies), rows, unparsable, tuple(missing), tuple(sums), tuple(largest)


def recounted(counts: Mapping[bytes, Count]) -> Side:
    """Return the recount's side."""
    return Side("recount", {key: count.plain() for key, count in counts.items()})


def state(config: JobConfig, factory: str, directory: Path) -> Side:
    """Return the job's state, restored from one backend only into an empty directory."""
    shutil.rmtree(directory, ignore_errors=True)
    elsewhere = JobConfig.from_mapping(
        {**config.to_mapping(), "task.restore.factories": [factory], "state.dir": str(directory)}
    )
    tallies: dict[bytes, Plain] = {}
    try:
        with StateManager(elsewhere, PARTITIONER) as manager:
            epoch = manager.acquire()
            for task, checkpoint in epoch.checkpoints.items():
                with open_attempt(elsewhere, task, checkpoint, epoch) as attempt:
                    for key, value in attempt.store(STORE).range():
                        tallies[key] = plain(Tally.from_json(value))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return Side(f"{_SHORT.get(factory, factory)} state", tallies)


def output(directory: Path) -> tuple[Side, Side]:
    """Return the sum of all changes in the output, and the newest total of every key."""
    import pyarrow.parquet as pq

    changes: dict[bytes, Tally] = {}
    newest: dict[bytes, Plain] = {}
    for part in sorted(directory.glob("sequence=*")):
        latest: dict[bytes, Tally] = {}
        for file in sorted(part.glob("*.parquet")):
            for row in pq.read_table(file, partitioning=None).to_pylist():
                change, total = Tally.from_json(row["change"]), Tally.from_json(row["total"])
                if row["key"] in changes:
                    changes[row["key"]].add(change)
                else:
                    changes[row["key"]] = change
                # In a large batch, a key may have several rows. The newest one has the highest count.
                if row["key"] not in latest or total.rows > latest[row["key"]].rows:
                    latest[row["key"]] = total
        newest.update({key: plain(total) for key, total in latest.items()})
    added = {key: plain(tally) for key, tally in changes.items()}
    return Side("output", added), Side("output (newest totals)", newest)


def plain(tally: Tally) -> Plain:
    """Return a comparable form. Decimals compare by value, so 1.50 equals 1.5."""
    return tally.rows, tally.unparsable, tuple(tally.missing), tuple(tally.sums), tuple(tally.largest)


def _added(one: list[int], other: object) -> list[int]:
    assert isinstance(other, tuple)
    return [a + b for a, b in zip(one or [0] * len(other), other, strict=True)]


def _exactly_added(one: list[Decimal], other: object) -> list[Decimal]:
    assert isinstance(other, tuple)
    return [EXACT.add(a, b) for a, b in zip(one or [Decimal(0)] * len(other), other, strict=True)]


def _largest(one: list[Decimal | None], other: object) -> list[Decimal | None]:
    assert isinstance(other, tuple)
    pairs = zip(one or [None] * len(other), other, strict=True)
    return [max((value for value in pair if value is not None), default=None) for pair in pairs]
