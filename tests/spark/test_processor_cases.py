"""Cases like those in Spark's own tests of ``transformWithState`` give the same rows in each batch on both engines.

All cases of a time mode share one query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from tests.spark.cases import INPUT, OUTPUT, Case, Rows, different, put
from tests.spark.conftest import Pipeline
from tests.spark.processors import Comparison

MakePipeline = Callable[..., Pipeline]


class Cases(StatefulProcessor):
    """Runs all cases. The first column of the key selects the case."""

    def __init__(self, cases: Mapping[str, Case]) -> None:
        self.cases = cases

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.states = {name: case.declare(handle) for name, case in self.cases.items()}

    def called(self, key: Any, times: Any, rows: list[Any] | None, expiry: int | None = None) -> list[Row]:
        """Return the rows with which the case answers rows or a timer."""
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


class CasesInPandas(Cases):
    """Runs all cases with data frames."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
        found = [row for frame in rows for row in frame.itertuples(index=False)]
        yield from self.framed(self.called(key, timerValues, found))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:  # noqa: N802, N803
        yield from self.framed(self.called(key, timerValues, None, expiredTimerInfo.getExpiryTimeInMs()))

    def framed(self, rows: list[Row]) -> Iterator[Any]:
        """Return each row as a data frame."""
        return (pd.DataFrame([row.asDict()]) for row in rows)


def ns(rows: list[Any]) -> list[Any]:
    """Return the column ``n``, sorted."""
    return sorted((None if pd.isna(row.n) else int(row.n) for row in rows), key=repr)


def value(name: str, schema: str = "n bigint", ttl_ms: int | None = None) -> Callable[[Any], Any]:
    """Return a function that declares a value."""
    return lambda handle: handle.getValueState(name, schema, ttl_ms)


def list_of(name: str, schema: str = "n bigint", ttl_ms: int | None = None) -> Callable[[Any], Any]:
    """Return a function that declares a list."""
    return lambda handle: handle.getListState(name, schema, ttl_ms)


def map_of(
    name: str, key: str = "k bigint", schema: str = "n bigint", ttl_ms: int | None = None
) -> Callable[[Any], Any]:
    """Return a function that declares a map."""
    return lambda handle: handle.getMapState(name, key, schema, ttl_ms)


def content(state: Any) -> list[Any]:
    """Return the sorted elements of a list or entries of a map, since the comparison ignores their order."""
    items = state.iterator() if hasattr(state, "iterator") else state.get()
    return sorted((tuple(map(tuple, item)) if hasattr(state, "iterator") else tuple(item) for item in items), key=repr)


# --- without a clock --------------------------------------------------------------------------------------------------


def counts(p: Cases, rows: list[Any]) -> Any:
    """Get, update and check a value."""
    before = p.state.exists(), p.state.get()
    p.state.update(((before[1][0] if before[1] else 0) + len(rows),))
    return before, p.state.exists(), p.state.get()


def clears(p: Cases, rows: list[Any]) -> Any:
    """Clear a value, even if there is none."""
    before = p.state.get()
    if ns(rows)[0] % 2:
        p.state.update((ns(rows)[0],))
    else:
        p.state.clear()
    return before, p.state.exists(), p.state.get()


TYPES = (
    "b boolean, i int, d double, s string, x binary, c decimal(10,2), day date, a array<int>, m map<string,int>, "
    "z struct<q:int>"
)


def types(p: Cases, rows: list[Any]) -> Any:
    """Update values of many types and nulls."""
    before = p.state.get()
    if ns(rows)[0] == 0:
        p.state.update((None,) * 10)
    else:
        x = (True, 7, 1.5, "ü\0", bytearray(b"\0\1"), Decimal("1.25"), date(2024, 2, 29), [1, None], {"k": 2}, Row(q=3))
        p.state.update(x)
    return before, p.state.get()


def partial(p: Cases, rows: list[Any]) -> Any:
    """Update a value that contains a null. The value exists nevertheless."""
    p.state.update((None, "x"))
    return p.state.exists(), p.state.get()


def appends(p: Cases, rows: list[Any]) -> Any:
    """Append values in the order of the calls."""
    for n in ns(rows):
        p.state.appendValue((n,))
    p.state.appendList([(100,), (101,)])
    return p.state.exists(), [tuple(item) for item in p.state.get()]


def replaces(p: Cases, rows: list[Any]) -> Any:
    """Put values in place of the old ones."""
    before = content(p.state)
    p.state.put([(n,) for n in ns(rows)])
    return before, content(p.state)


def empties(p: Cases, rows: list[Any]) -> Any:
    """Clear the complete list."""
    p.state.appendValue((1,))
    if ns(rows)[0] % 2:
        p.state.clear()
    return p.state.exists(), content(p.state)


def structs(p: Cases, rows: list[Any]) -> Any:
    """Append structs with nulls."""
    p.state.appendList([(n, None if n == 1 else str(n)) for n in ns(rows)])
    return content(p.state)


def maps(p: Cases, rows: list[Any]) -> Any:
    """Call each method of a map."""
    for n in ns(rows):
        old = p.state.getValue((n,))
        p.state.updateValue((n,), ((old[0] if old else 0) + 1,))
    keys, values = sorted(map(tuple, p.state.keys())), sorted(map(tuple, p.state.values()))
    return p.state.exists(), p.state.containsKey((1,)), p.state.containsKey((99,)), content(p.state), keys, values


def removes(p: Cases, rows: list[Any]) -> Any:
    """Remove existing and missing keys of a map."""
    for n in ns(rows):
        p.state.updateValue((n,), (n,))
    p.state.removeKey((ns(rows)[0],))
    p.state.removeKey((99,))
    return p.state.exists(), content(p.state)


def clears_map(p: Cases, rows: list[Any]) -> Any:
    """Clear a map and fill it again."""
    before = content(p.state)
    p.state.clear()
    cleared = p.state.exists(), p.state.getValue((1,))
    for n in ns(rows):
        p.state.updateValue((n,), (n,))
    return before, cleared, content(p.state)


def wide_keys(p: Cases, rows: list[Any]) -> Any:
    """Use keys of two columns, some of which are null."""
    for n in ns(rows):
        p.state.updateValue((n, None if n % 2 else "even"), (str(n), None))
    return content(p.state), p.state.getValue((2, "even")), p.state.getValue((2, None))


def several(p: Cases, rows: list[Any]) -> Any:
    """Use three variables of one key."""
    total, seen, by = p.state
    old = total.get()
    total.update(((old[0] if old else 0) + sum(ns(rows)),))
    seen.appendList([(n,) for n in ns(rows)])
    for n in ns(rows):
        by.updateValue((n,), (total.get()[0],))
    if total.get()[0] > 5:
        seen.clear()
    return total.get(), content(seen), content(by)


def declare_several(handle: Any) -> Any:
    """Declare the three variables."""
    return value("v_total")(handle), list_of("l_seen")(handle), map_of("m_by")(handle)


def clock(p: Cases, rows: list[Any]) -> Any:
    """Return the times that a query without a clock has."""
    return p.times.getCurrentProcessingTimeInMs(), p.times.getCurrentWatermarkInMs()


def silent(p: Cases, rows: list[Any]) -> Any:
    """Return no output row in some batches."""
    old = p.state.get()
    p.state.update(((old[0] if old else 0) + len(rows),))
    return None if p.state.get()[0] < 3 else p.state.get()


def columns(p: Cases, rows: list[Any]) -> Any:
    """Return all columns of a row, including nulls."""
    return [(row.case, row.id, ns([row])) for row in rows]


AB: list[Rows] = [[("a", 1), ("b", 2)], [("a", 2)], [("a", 3), ("a", 1), ("b", 2)], [("b", 3), (None, 1)]]
NO_CLOCK = {
    "counts": Case(counts, AB, value("v_counts")),
    "clears": Case(clears, AB, value("v_clears")),
    "types": Case(types, [[("a", 1), ("b", 0)], [("a", 0), ("b", 1)], [("a", 1), ("b", 1)]], value("v_types", TYPES)),
    "partial": Case(partial, AB, value("v_partial", "n bigint, s string")),
    "appends": Case(appends, AB, list_of("l_appends")),
    "replaces": Case(replaces, AB, list_of("l_replaces")),
    "empties": Case(empties, AB, list_of("l_empties")),
    "structs": Case(structs, AB, list_of("l_structs", "n bigint, s string")),
    "maps": Case(maps, AB, map_of("m_maps")),
    "removes": Case(removes, AB, map_of("m_removes")),
    "clears_map": Case(clears_map, AB, map_of("m_clears")),
    "wide_keys": Case(wide_keys, AB, map_of("m_wide", "k bigint, t string", "s string, n bigint")),
    "several": Case(several, AB, declare_several),
    "clock": Case(clock, AB),
    "silent": Case(silent, AB, value("v_silent")),
    "columns": Case(columns, [[("a", 1), ("a", None)], [(None, None)]]),
}

# --- processing time --------------------------------------------------------------------------------------------------


def now(p: Cases) -> int:
    """Return the time of the batch in epoch milliseconds."""
    return int(p.times.getCurrentProcessingTimeInMs())


def short_value(p: Cases, rows: list[Any]) -> Any:
    """Update a value whose TTL of 1 ms ends before the next batch."""
    before = p.state.exists(), p.state.get()
    p.state.update((ns(rows)[0],))
    return before, p.state.exists(), p.state.get()


def short_list(p: Cases, rows: list[Any]) -> Any:
    """Append to a list whose elements have a TTL."""
    before = p.state.exists(), content(p.state)
    p.state.appendList([(n,) for n in ns(rows)])
    return before, content(p.state)


def short_map(p: Cases, rows: list[Any]) -> Any:
    """Update a map whose entries have a TTL."""
    before = p.state.exists(), content(p.state), p.state.containsKey((1,)), p.state.getValue((1,))
    for n in ns(rows):
        p.state.updateValue((n,), (n,))
    return before, content(p.state)


def once(p: Cases, rows: list[Any]) -> Any:
    """Update the value in the first batch only."""
    if ns(rows)[0] == 1:
        p.state.update((1,))
    return p.state.exists(), p.state.get()


def mixed(p: Cases, rows: list[Any]) -> Any:
    """Update one value with a TTL and one without."""
    kept, gone = p.state
    before = kept.get(), gone.get()
    for state in (kept, gone):
        state.update((ns(rows)[0],))
    return before, kept.get(), gone.get()


def past(p: Cases, rows: list[Any]) -> Any:
    """Register expired timers, which fire in the same batch."""
    for n in ns(rows):
        p.handle.registerTimer(n)
        p.handle.registerTimer(n)  # registering it twice has no effect
    return sorted(p.handle.listTimers())


def fired(p: Cases, expiry: int) -> Any:
    """Return the time of a timer that fires."""
    return "fired", expiry, sorted(p.handle.listTimers())


def deletes(p: Cases, rows: list[Any]) -> Any:
    """Delete a timer, which then does not fire."""
    p.handle.registerTimer(10)
    p.handle.registerTimer(20)
    p.handle.deleteTimer(10)
    p.handle.deleteTimer(30)
    return sorted(p.handle.listTimers())


def far(p: Cases, rows: list[Any]) -> Any:
    """Register timers that stay through other batches."""
    p.handle.registerTimer(4_000_000_000_000 + ns(rows)[0])
    return sorted(p.handle.listTimers())


def watermark(p: Cases, rows: list[Any]) -> Any:
    """Check the clock and the missing watermark."""
    return now(p) > 1_700_000_000_000, p.times.getCurrentWatermarkInMs()


ALWAYS: list[Rows] = [[("a", 1), ("b", 1)], [("a", 2)], [("a", 3), ("b", 2)], [("a", 4), ("b", 3)]]
HOUR = 3_600_000
PROCESSING_TIME = {
    "short_value": Case(short_value, ALWAYS, value("v_short", ttl_ms=1)),
    "long_value": Case(short_value, ALWAYS, value("v_long", ttl_ms=HOUR)),
    "short_list": Case(short_list, ALWAYS, list_of("l_short", ttl_ms=1)),
    "long_list": Case(short_list, ALWAYS, list_of("l_long", ttl_ms=HOUR)),
    "short_map": Case(short_map, ALWAYS, map_of("m_short", ttl_ms=1)),
    "long_map": Case(short_map, ALWAYS, map_of("m_long", ttl_ms=HOUR)),
    "once": Case(once, ALWAYS, value("v_once", ttl_ms=1)),
    "mixed": Case(mixed, ALWAYS, lambda handle: (value("v_kept")(handle), value("v_gone", ttl_ms=1)(handle))),
    "past": Case(past, ALWAYS, expire=fired),
    "deletes": Case(deletes, ALWAYS, expire=fired),
    "far": Case(far, ALWAYS, expire=fired),
    "watermark": Case(watermark, ALWAYS),
}

# --- event time -------------------------------------------------------------------------------------------------------


def millis(seconds: float) -> int:
    """Return a second of the first day of 2024 as milliseconds."""
    return round((datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)).timestamp() * 1000)


def at_n(p: Cases, rows: list[Any]) -> Any:
    """Register a timer at each second that the input names."""
    for n in ns(rows):
        p.handle.registerTimer(millis(n))
    return ns(rows), p.times.getCurrentWatermarkInMs(), sorted(p.handle.listTimers())


def sees(p: Cases, expiry: int) -> Any:
    """Return the watermark and the remaining timers."""
    return "fired", expiry, p.times.getCurrentWatermarkInMs(), sorted(p.handle.listTimers())


def session(p: Cases, rows: list[Any]) -> Any:
    """Extend a session: each row moves its end."""
    for time in list(p.handle.listTimers()):
        p.handle.deleteTimer(time)
    p.state.appendList([(n,) for n in ns(rows)])
    p.handle.registerTimer(millis(max(ns(rows)) + 5))


def session_ends(p: Cases, expiry: int) -> Any:
    """Return the rows of a session that ends, and delete its state."""
    found = content(p.state)
    p.state.clear()
    return "session", expiry, found


def rearm(p: Cases, expiry: int) -> Any:
    """Register the next timer when one fires. The next one may already be due."""
    p.handle.registerTimer(expiry + 4000)
    return "fired", expiry


def rows_of(p: Cases, rows: list[Any]) -> Any:
    """Return the rows of the call. Late rows are not among them."""
    return ns(rows)


# the watermarks of the batches are 0, 18, 28 and 38, and 38 in a last one without input
TIME: list[Rows] = [[("w", 0, 20)], [("w", 0, 30)], [("w", 0, 40)]]
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
@pytest.mark.parametrize("processor", [Cases, CasesInPandas])
@pytest.mark.parametrize(
    ("cases", "mode"),
    [
        pytest.param(NO_CLOCK, "none", id="none"),
        pytest.param(PROCESSING_TIME, "ProcessingTime", id="processing-time"),
        pytest.param(EVENT_TIME, "EventTime", id="event-time"),
    ],
)
def test_cases_as_on_spark(
    pipeline: MakePipeline, cases: Mapping[str, Case], mode: str, processor: type[Cases]
) -> None:
    """All cases give the same rows as on Spark, with rows and with data frames.

    In event time, Spark's last batch has no input. Here it is the first batch of the next start.
    """
    watermark = "2 seconds" if mode == "EventTime" else None
    job = pipeline(tasks=2, partitions=1)
    comparison = Comparison(job, keys=("case", "id"), input=INPUT, watermark=watermark)
    put(comparison, cases)
    pandas = processor is CasesInPandas
    starts = 2 if mode == "EventTime" else 1
    found = [
        batch for _ in range(starts) for batch in comparison.on_statemgr(processor(cases), OUTPUT, mode, pandas=pandas)
    ]

    expected = comparison.on_spark(processor(cases), OUTPUT, mode, pandas=pandas)

    assert not different(found, expected, cases)
