"""Which blobs have their turn in a look."""

from __future__ import annotations

import pytest

from statemgr.flows.upkeep import Turn
from statemgr.model.checkpoint import BlobRef

NAMES = [f"orders/1/Partition_0/totals/{number}/index" for number in range(500)]
TASKS = [f"Partition {number}" for number in range(3)]
DAY_S = 24 * 3600.0


def turns(task: str, edges: list[float]) -> list[int]:
    """Return how often each blob has its turn, in looks between these times."""
    found = [of for turn in map(Turn, edges, edges[1:]) if (of := turn.of(task)) is not None]
    return [sum(of(name) for of in found) for name in NAMES]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("begin_s", [0.0, 12_345.6, DAY_S - 1])
def test_each_blob_has_one_turn_in_a_day(task: str, begin_s: float) -> None:
    """The looks of a day, whenever they begin, and however long they take, include each blob once."""
    edges = [begin_s + DAY_S * number / 1440 + (number % 7 if 0 < number < 1440 else 0) for number in range(1441)]
    assert set(turns(task, edges)) == {1}


@pytest.mark.parametrize("task", TASKS)
def test_blobs_are_listed_once_an_hour(task: str) -> None:
    """In the other looks nobody reads an index. In none, all blobs have their turn."""
    found = [Turn(at, at + 60.0).of(task) for at in range(0, 3600, 60)]
    (only,) = filter(None, found)
    assert sum(map(only, NAMES)) < len(NAMES) / 10


def test_after_a_day_without_a_look_each_has_its_turn() -> None:
    """A process that was suspended for days asks for everything once."""
    assert set(turns(TASKS[0], [1000.0, 1000.0 + 2.5 * DAY_S])) == {1}


def test_an_order_comes_before_its_turn_and_is_read_whole() -> None:
    """A blob that an order names is read, however large it is."""
    turn = Turn(0.0, 0.0, frozenset({"large"}))
    named = turn.of(TASKS[0])
    assert named is not None
    assert named("large")
    assert not any(map(named, NAMES))
    assert turn.reads(BlobRef("large", 1 << 40, b""), 1 << 40)
    assert not turn.reads(BlobRef("other", 1 << 40, b""), 1 << 40)
