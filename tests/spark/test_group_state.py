"""``applyInPandasWithState`` on both engines: the same functions and input give the same rows in each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.spark.cases import INPUT, OUTPUT, Case, different, put
from tests.spark.conftest import Pipeline
from tests.spark.processors import Comparison

MakePipeline = Callable[..., Pipeline]
Frames = Iterable[pd.DataFrame]


def raised(call: Callable[[], Any]) -> str:
    """Return the name of the error that a call raises, or its result."""
    try:
        return f"returned {call()}"
    except Exception as error:
        return type(error).__name__


def numbers(frames: Frames) -> list[int]:
    """Return the column ``n`` of all frames, sorted."""
    return sorted(int(n) for frame in frames for n in frame["n"])


def counts(frames: Frames, state: Any) -> Any:
    """Update, get and check for existence."""
    before = state.exists, state.getOption
    state.update(((state.get[0] if state.exists else 0) + len(numbers(frames)), None))
    return before, state.exists, state.get


def removes(frames: Frames, state: Any) -> Any:
    """Remove a key's state at an even number, after which it has no value."""
    before = state.getOption
    last = numbers(frames)[-1]
    if last % 2:
        state.update((last, "odd"))
    else:
        state.remove()
    return before, state.exists, raised(lambda: state.get), state.getOption


def refuses(frames: Frames, state: Any) -> Any:
    """Make calls that need a timeout or a watermark, which the query does not have."""
    calls = [
        lambda: state.update(None),
        lambda: state.setTimeoutDuration(1000),
        lambda: state.setTimeoutTimestamp(1000),
        state.getCurrentWatermarkMs,
    ]
    return [raised(call) for call in calls], state.hasTimedOut, state.getCurrentProcessingTimeMs() > 1_700_000_000_000


def keeps(frames: Frames, state: Any) -> Any:
    """Write the state once, and only read it afterwards."""
    if not state.exists:
        state.update((numbers(frames)[0], "first"))
    return state.get


def in_numpy(frames: Frames, state: Any) -> Any:
    """Update the state with numpy values."""
    total = sum((frame["n"].sum() for frame in frames), np.int64(state.get[0] if state.exists else 0))
    state.update((total, None))
    return [int(value) for value in state.get if value is not None]


def unread(frames: Frames, state: Any) -> Any:
    """Leave the input unread."""
    state.update(((state.get[0] if state.exists else 0) + 1, "calls"))
    return state.get


def types(frames: Frames, state: Any) -> Any:
    """Return the columns and types of the frames, with and without nulls."""
    found = [(list(frame.columns), [str(dtype) for dtype in frame.dtypes], list(frame.index)) for frame in frames]
    state.update((None, None))
    return found, state.get


def both(frames: Frames, state: Any) -> Any:
    """Change the state several times in a call. The last change counts."""
    before = state.getOption
    odd = numbers(frames)[0] % 2
    state.update((1, "a"))
    state.remove()
    if odd:
        state.update((2, "b"))
    return before, state.exists


def nothing(frames: Frames, state: Any) -> Any:
    """Return no rows for some keys."""
    state.update((len(numbers(frames)), None))
    return None if state.get[0] > 1 else state.get


NO_TIMEOUT = {
    "counts": Case(counts, [[("a", 1), ("b", 2), ("a", 3)], [("a", 1)], [("b", 1), (None, 2)], [(None, 3), ("c", 1)]]),
    "removes": Case(removes, [[("a", 1), ("b", 2)], [("a", 2), ("b", 3)], [("a", 4), ("b", 5)], [("a", 7)]]),
    "refuses": Case(refuses, [[("a", 1)], [("a", 1), ("b", 1)]]),
    "keeps": Case(keeps, [[("a", 5)], [("a", 6)], [("b", 7)], [("a", 8), ("b", 9)]]),
    "in_numpy": Case(in_numpy, [[("a", 5), ("a", 6)], [("a", 6)], [("b", 7)]]),
    "unread": Case(unread, [[("a", 5), ("a", 6)], [("a", 6), ("b", 1)], [("b", 7)]]),
    "types": Case(types, [[("a", 5), ("b", None)], [("a", None), ("a", 1)], [(None, 1, 20)]]),
    "both": Case(both, [[("a", 1), ("b", 2)], [("a", 2), ("b", 1)], [("a", 1), ("b", 1)]]),
    "nothing": Case(nothing, [[("a", 1), ("b", 2), ("b", 3)], [("a", 1), ("a", 2), ("b", 1)]]),
}


def times_out(frames: Frames, state: Any) -> Any:
    """Return "out" and remove the state when a key times out. Its one frame is empty and has the input's columns."""
    if state.hasTimedOut:
        (frame,) = frames
        before = state.get
        state.remove()
        return "out", before, list(frame.columns), len(frame)
    state.update((len(numbers(frames)), "in"))
    state.setTimeoutDuration(1)
    return "in", state.get


def in_time(frames: Frames, state: Any) -> Any:
    """Keep a key from timing out by rows in each batch."""
    if state.hasTimedOut:
        return "out"
    state.update((len(numbers(frames)), None))
    state.setTimeoutDuration(1)
    return "in"


def without_state(frames: Frames, state: Any) -> Any:
    """Set a timeout on a removed key, which times out, too."""
    if state.hasTimedOut:
        return "out", state.exists, state.getOption
    state.update((1, None))
    state.remove()
    state.setTimeoutDuration(1)
    return "in", state.exists


def not_renewed(frames: Frames, state: Any) -> Any:
    """Set a timeout only at first. The next call sets none, which cancels it."""
    before = state.getOption
    if before is None:
        state.update((numbers(frames)[0], None))
        state.setTimeoutDuration(1)
    return before, state.hasTimedOut


def far(frames: Frames, state: Any) -> Any:
    """Set a timeout in an hour."""
    state.update((len(numbers(frames)), None))
    state.setTimeoutDuration(3_600_000)
    return state.hasTimedOut


def again(frames: Frames, state: Any) -> Any:
    """Set another timeout when one has come."""
    count = (state.get[0] if state.exists else 0) + 1
    state.update((count, None))
    if count < 3:
        state.setTimeoutDuration(1)
    return count, state.hasTimedOut


def refuses_durations(frames: Frames, state: Any) -> Any:
    """Pass invalid durations, and make calls that need the other kind of timeout."""
    calls = [
        lambda: state.setTimeoutDuration(0),
        lambda: state.setTimeoutDuration(-1),
        lambda: state.setTimeoutDuration("1 hour"),
        lambda: state.setTimeoutTimestamp(1_000_000),
        state.getCurrentWatermarkMs,
    ]
    return [raised(call) for call in calls]


FIRST: list[list[tuple[Any, ...]]] = [[("a", 1), ("b", 2)], [], [("b", 3)], []]
PROCESSING_TIME = {
    "times_out": Case(times_out, FIRST),
    "in_time": Case(in_time, [[("a", 1), ("b", 1)], [("a", 1)], [("a", 1)], [("a", 1)]]),
    "without_state": Case(without_state, FIRST),
    "not_renewed": Case(not_renewed, [[("a", 1)], [("a", 2)], [], [("a", 3)]]),
    "far": Case(far, FIRST),
    "again": Case(again, FIRST),
    "refuses_durations": Case(refuses_durations, FIRST),
}


def millis(seconds: float) -> int:
    """Return a second of the first day of 2024 as milliseconds."""
    return round((datetime(2024, 1, 1, tzinfo=UTC).timestamp() + seconds) * 1000)


def at_n(frames: Frames, state: Any) -> Any:
    """Set a timeout at the second that the input names. It fires after the watermark has passed it."""
    if state.hasTimedOut:
        before = state.get
        state.remove()
        return "out", before, state.getCurrentWatermarkMs()
    n = numbers(frames)[-1]
    state.update((n, None))
    state.setTimeoutTimestamp(millis(n))
    return "in", n, state.getCurrentWatermarkMs()


def at_a_datetime(frames: Frames, state: Any) -> Any:
    """Set a timeout with a datetime."""
    if state.hasTimedOut:
        return "out", state.get
    n = numbers(frames)[-1]
    state.update((n, "d"))
    state.setTimeoutTimestamp(datetime.fromtimestamp(millis(n) / 1000, UTC))
    return "in", n


def refuses_timestamps(frames: Frames, state: Any) -> Any:
    """Set timeouts that are older than the watermark, zero, or a duration."""
    calls = [
        lambda: state.setTimeoutTimestamp(state.getCurrentWatermarkMs() - 1),
        lambda: state.setTimeoutTimestamp(0),
        lambda: state.setTimeoutDuration(1000),
    ]
    return [raised(call) for call in calls], state.hasTimedOut


def late(frames: Frames, state: Any) -> Any:
    """Return the rows of the call. Late rows are not among them."""
    return numbers(frames)


EVENT_TIME = {
    # the watermarks of the batches are 0, 18, 28, and 38 in the last one, which has no input
    "watermark": Case(late, [[("w", 0, 20)], [("w", 0, 30)], [("w", 0, 40)]]),
    "at_n": Case(
        at_n, [[("a", 18, 20), ("b", 17, 20), ("c", 28, 20), ("d", 50, 20)], [("c", 38, 30)], [("e", 37, 40)]]
    ),
    "at_a_datetime": Case(at_a_datetime, [[("a", 18, 20), ("b", 27, 20)], [("b", 30, 30)], []]),
    "refuses_timestamps": Case(refuses_timestamps, [[("b", 2, 19)], [("a", 1, 30)], [("a", 2, 40)]]),
    "late": Case(late, [[("a", 1, 20), ("a", 2, 1)], [("a", 3, 18), ("a", 4, 30)], [("a", 5, 18), ("a", 6, 19)]]),
    "no_time": Case(late, [[("a", 1)], [("a", 2)], [("a", 3)]]),
}


def function(cases: Mapping[str, Case]) -> Callable[[Any, Any, Any], Iterator[pd.DataFrame]]:
    """Return one function for all cases. The first column of the key selects the case."""

    def run(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
        name, own = key
        seen = cases[name].act(frames, state) if name in cases else None
        if seen is not None:
            yield pd.DataFrame({"case": [name], "id": [own], "seen": [repr(seen)]})

    return run


def comparison_of(pipeline: MakePipeline, cases: Mapping[str, Case], watermark: str | None = None) -> Comparison:
    """Return a comparison of both engines with the rows of all cases."""
    job = pipeline(tasks=2, partitions=1)
    comparison = Comparison(job, keys=("case", "id"), input=INPUT, watermark=watermark)
    put(comparison, cases)
    return comparison


@pytest.mark.long
def test_without_timeouts_as_on_spark(pipeline: MakePipeline) -> None:
    """Every use of the state without timeouts gives the same rows as on Spark."""
    comparison = comparison_of(pipeline, NO_TIMEOUT)
    found = comparison.on_statemgr(function(NO_TIMEOUT), OUTPUT)
    assert not different(found, comparison.on_spark(function(NO_TIMEOUT), OUTPUT), NO_TIMEOUT)


@pytest.mark.long
def test_timeouts_of_processing_time_as_on_spark(pipeline: MakePipeline) -> None:
    """A timeout of 1 ms fires in the next batch, as on Spark. Spark's batches continue without end."""
    comparison = comparison_of(pipeline, PROCESSING_TIME)
    found = comparison.on_statemgr(function(PROCESSING_TIME), OUTPUT, "ProcessingTime")
    expected = comparison.on_spark(function(PROCESSING_TIME), OUTPUT, "ProcessingTime")[: len(found)]
    assert not different(found, expected, PROCESSING_TIME)


@pytest.mark.long
def test_timeouts_of_event_time_as_on_spark(pipeline: MakePipeline) -> None:
    """Event-time timeouts give the same rows as on Spark. Its last, empty batch is the next start's first one here."""
    comparison = comparison_of(pipeline, EVENT_TIME, "2 seconds")
    found = [batch for _ in range(2) for batch in comparison.on_statemgr(function(EVENT_TIME), OUTPUT, "EventTime")]
    expected = comparison.on_spark(function(EVENT_TIME), OUTPUT, "EventTime")
    assert not different(found, expected, EVENT_TIME)


@pytest.mark.long
@pytest.mark.parametrize("timeout", ["none", "ProcessingTime"])
def test_frames_of_a_group_that_is_split(pipeline: MakePipeline, timeout: str) -> None:
    """A group that is larger than a record batch arrives in several frames, and has its state once."""
    many = Case(counts, [[("a", n) for n in range(25)]])
    comparison = comparison_of(pipeline, {"many": many})
    setting = "spark.sql.execution.arrow.maxRecordsPerBatch"
    comparison.job.spark.conf.set(setting, "10")
    try:
        found = comparison.on_statemgr(function({"many": many}), OUTPUT, timeout)
    finally:
        comparison.job.spark.conf.unset(setting)
    assert found == [[("many", "a", repr(((False, None), True, (25, None))))]]
