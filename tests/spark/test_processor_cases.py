"""Cases shaped like Spark's own suites for Python's ``transformWithState``, on both engines: the same rows batch by
batch. All cases share one query."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from tests.spark.cases import INPUT, OUTPUT, Case, different, put
from tests.spark.conftest import Pipeline
from tests.spark.processors import Comparison

MakePipeline = Callable[..., Pipeline]


class Cases(StatefulProcessor):
    """Runs all cases: the first column of the key chooses."""

    def __init__(self, cases: Mapping[str, Case]) -> None:
        self.cases = cases

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.states = {name: case.declare(handle) for name, case in self.cases.items()}

    def called(self, key: Any, times: Any, rows: list[Any] | None, expiry: int | None = None) -> list[Row]:
        """What the case says to rows, or to a timer."""
        name, own = key[0], key[1]
        if name not in self.cases:
            return []
        case, self.state, self.times = self.cases[name], self.states[name], times
        seen = case.act(self, rows) if rows is not None else case.expire(self, expiry)
        return [] if seen is None else [Row(case=name, id=own, seen=repr(seen))]

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
        yield from self.called(key, timerValues, list(rows))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:  # noqa: N802, N803
        yield from self.called(key, timerValues, None, expiredTimerInfo.getExpiryTimeInMs())

    def close(self) -> None:
        pass


def ns(rows: list[Any]) -> list[Any]:
    """The column ``n``, sorted."""
    return sorted((None if pd.isna(row.n) else int(row.n) for row in rows), key=repr)


def list_of(name: str, schema: str = "n bigint", ttl_ms: int | None = None) -> Callable[[Any], Any]:
    """Declares a list."""
    return lambda handle: handle.getListState(name, schema, ttl_ms)


def content(state: Any) -> list[Any]:
    """The elements of a list or the entries of a map, whose order is not compared."""
    items = state.iterator() if hasattr(state, "iterator") else state.get()
    return sorted((tuple(map(tuple, item)) if hasattr(state, "iterator") else tuple(item) for item in items), key=repr)


def fired(p: Cases, expiry: int) -> Any:
    """The time of a timer."""
    return "fired", expiry, sorted(p.handle.listTimers())


def deletes(p: Cases, rows: list[Any]) -> Any:
    """A timer that is deleted does not fire."""
    p.handle.registerTimer(10)
    p.handle.registerTimer(20)
    p.handle.deleteTimer(10)
    p.handle.deleteTimer(30)
    return sorted(p.handle.listTimers())


def millis(seconds: float) -> int:
    """A second of the first day of 2024."""
    return round((datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)).timestamp() * 1000)


def at_n(p: Cases, rows: list[Any]) -> Any:
    """A timer at each second that the input names."""
    for n in ns(rows):
        p.handle.registerTimer(millis(n))
    return ns(rows), p.times.getCurrentWatermarkInMs(), sorted(p.handle.listTimers())


def sees(p: Cases, expiry: int) -> Any:
    """The watermark and the timers that are left."""
    return "fired", expiry, p.times.getCurrentWatermarkInMs(), sorted(p.handle.listTimers())


def session(p: Cases, rows: list[Any]) -> Any:
    """A session: each row moves its end."""
    for time in list(p.handle.listTimers()):
        p.handle.deleteTimer(time)
    p.state.appendList([(n,) for n in ns(rows)])
    p.handle.registerTimer(millis(max(ns(rows)) + 5))


def session_ends(p: Cases, expiry: int) -> Any:
    """It has its rows, and is gone."""
    found = content(p.state)
    p.state.clear()
    return "session", expiry, found


def rearm(p: Cases, expiry: int) -> Any:
    """A timer that registers the next one, which may be due already."""
    p.handle.registerTimer(expiry + 4000)
    return "fired", expiry


def rows_of(p: Cases, rows: list[Any]) -> Any:
    """Late rows do not come."""
    return ns(rows)


# the watermark is 0, 18, 28 and 38 in the batches, and 38 in a last one without input
TIME = [[("w", 0, 20)], [("w", 0, 30)], [("w", 0, 40)]]
EVENT_TIME = {
    "watermark": Case(rows_of, TIME),
    "at_n": Case(at_n, [[("a", 17, 20), ("a", 18, 20), ("b", 19, 20)], [("a", 28, 30)], [("b", 100, 40)]], expire=sees),
    "past": Case(at_n, [[("a", -1, 20)], [("a", 5, 30)], [("a", 28, 40), ("b", 27, 40)]], expire=sees),
    "session": Case(
        session,
        [[("a", 10, 10), ("b", 12, 12)], [("a", 20, 20), ("b", 30, 30)], [("a", 29, 29), ("c", 33, 33)]],
        list_of("l_session"),
        session_ends,
    ),
    "rearm": Case(at_n, [[("a", 10, 20)], [], []], expire=rearm),
    "late": Case(rows_of, [[("a", 1, 20), ("a", 2, 1)], [("a", 3, 18), ("a", 4, 30)], [("a", 5, 18), ("a", 6, 19)]]),
    "boundary": Case(rows_of, [[("a", 1, 20)], [("a", 2, 0)], [("a", 3, 18.001), ("a", 4, 18)]]),
    "no_time": Case(rows_of, [[("a", 1)], [("a", 2)], [("a", 3)]]),
    "deletes": Case(deletes, TIME, expire=fired),
}


@pytest.mark.long
@pytest.mark.timeout(480)
def test_cases_of_event_time_as_on_spark(pipeline: MakePipeline) -> None:
    """Spark's last batch, which has no input, is the first one of the next start here."""
    comparison = Comparison(pipeline(tasks=2, partitions=1), keys=("case", "id"), input=INPUT, watermark="2 seconds")
    put(comparison, EVENT_TIME)
    found = [batch for _ in range(2) for batch in comparison.on_statemgr(Cases(EVENT_TIME), OUTPUT, "EventTime")]

    expected = comparison.on_spark(Cases(EVENT_TIME), OUTPUT, "EventTime")

    assert not different(found, expected, EVENT_TIME)
