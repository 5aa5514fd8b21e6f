"""materialize: when the tasks of a job make their snapshots, and what their metrics report. Needs no broker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from statemgr.phases import Phase, observed
from statemgr.services import Services
from statemgr.wiring import open_services
from tests.blob_faults import ManualClock
from tests.commits import failing
from tests.segment_tasks import STORE, SegmentTask, Told, config_of

Open = Callable[..., Sequence[SegmentTask]]


@pytest.fixture
def clock() -> ManualClock:
    """A manual clock."""
    return ManualClock()


@pytest.fixture
def open_tasks(tmp_path: Path, clock: ManualClock) -> Iterator[Open]:
    """Opens the tasks of a job with a snapshot interval."""
    opened: list[SegmentTask] = []
    opened_services: list[Services] = []

    def make(tasks: int, interval: str) -> Sequence[SegmentTask]:
        opened_services.append(open_services(config_of(tmp_path, task__commit__snapshot__interval=[interval]), clock))
        opened.extend(SegmentTask(opened_services[0], number) for number in range(tasks))
        return opened

    yield make
    for task in opened:
        task.close()
    for services in opened_services:
        services.close()


@pytest.mark.parametrize("interval", ["16 commits", "8 min"])
def test_the_snapshots_of_tasks_are_spread_over_the_interval(
    open_tasks: Open, clock: ManualClock, interval: str
) -> None:
    """C10: tasks that start and commit together make their snapshots at different times, and none of them is late."""
    tasks = open_tasks(10, interval)
    rounds: dict[str, list[int]] = {task.name: [] for task in tasks}
    for number in range(36):
        for task in tasks:
            made = len(task.told.seconds)
            task.commit()
            if len(task.told.seconds) > made:
                rounds[task.name].append(number)
        clock.now += 30
    firsts = [of_task[0] for of_task in rounds.values()]
    assert 8 <= min(firsts) < max(firsts) <= 17
    assert len(set(firsts)) >= 5, firsts
    assert max(firsts.count(number) for number in firsts) <= 3, firsts
    for of_task in rounds.values():
        gaps = [after - before for before, after in itertools.pairwise(of_task)]
        assert gaps
        assert all(8 <= gap <= 18 for gap in gaps), gaps


def test_what_is_told_of_snapshots(open_tasks: Open, clock: ManualClock) -> None:
    """B11, C9: the metrics report the segments after each commit, how long a snapshot took, and that one failed."""
    [task] = open_tasks(1, "1 B")

    def slow(phase: Phase, _: str) -> None:
        if phase is Phase.MATERIALIZE:
            clock.now += 7

    task.commit()
    assert task.told == Told([(0, 0)])
    with failing(Phase.MATERIALIZE):
        task.commit()
    with observed(slow):
        task.commit()
    task.commit()
    assert task.told.seconds == [None, 7, 0]
    assert [segments for segments, _ in task.told.backlogs] == [0, 1, 2, 1]
    assert all(size > 0 for segments, size in task.told.backlogs if segments)


def test_a_snapshot_that_ends_or_begins_at_this_moment(open_tasks: Open) -> None:
    """The owner looks at the last failures and snapshots while the thread that makes snapshots forgets them."""

    class Forgotten(dict[str, int]):
        def __iter__(self) -> Iterator[str]:
            names = list(super().__iter__())
            self.clear()
            return iter(names)

    (task,) = open_tasks(1, "16 commits")
    task.commit()
    task.snapshots._failed = {STORE: KeyError("a mistake")}
    task.snapshots.raise_failures()
    task.snapshots._made = Forgotten({STORE: 1})
    task.snapshots.close()
    assert not task.snapshots._made
