"""A task's rows as groups of data frames, and yielded frames as record batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Row
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DecimalType, LongType, StringType, StructField, StructType

from spark_integration.partitioning import column_named
from spark_integration.processors.groups import EventTime, Form, grouped, in_time
from spark_integration.processors.yielded import converted
from spark_integration.sessions import limit
from statemgr.errors import InvalidError

KEY = StructType([StructField("key", StringType())])
OUTPUT = StructType([StructField("key", StringType()), StructField("n", LongType())])


def ignore(keys: list[bytes]) -> None:
    """Read nothing ahead."""


def form(rows_per_frame: int = 10_000, **more: Any) -> Form:
    """Return how rows are passed to a processor."""
    return Form(pandas=True, timezone="UTC", safe=True, rows_per_frame=rows_per_frame, **more)


def frames_of(batches: list[pa.RecordBatch], rows_per_frame: int = 10_000) -> dict[str, list[pd.DataFrame]]:
    """Return key → the frames of its group."""
    return {key[0]: list(rows) for _, key, rows, _ in grouped(batches, KEY, form(rows_per_frame), ignore)}


def batch(keys: list[str], **columns: pa.Array) -> pa.RecordBatch:
    """Return a record batch with a key column."""
    return pa.record_batch({"key": pa.array(keys), **columns})


def test_a_group_is_one_frame_as_pandas_makes_it_of_rows() -> None:
    """Narrow numbers become wide, as in a frame made of Python values."""
    found = frames_of(
        [batch(["a", "a", "b"], n=pa.array([1, 2, 3], pa.int32()), x=pa.array([0.5, 1, 2], pa.float32()))]
    )
    pd.testing.assert_frame_equal(found["a"][0], pd.DataFrame({"key": ["a", "a"], "n": [1, 2], "x": [0.5, 1.0]}))
    pd.testing.assert_frame_equal(found["b"][0], pd.DataFrame({"key": ["b"], "n": [3], "x": [2.0]}))


def test_a_group_goes_on_in_the_next_record_batch() -> None:
    """A frame has up to the configured number of rows, wherever a record batch ends."""
    batches = [batch(["a", "b"], n=pa.array([1, 2])), batch(["b", "b", "b"], n=pa.array([3, 4, 5]))]
    [whole] = frames_of(batches)["b"]
    assert whole["n"].tolist() == [2, 3, 4, 5]
    assert whole.index.tolist() == [0, 1, 2, 3]
    assert [frame["n"].tolist() for frame in frames_of(batches, 2)["b"]] == [[2, 3], [4, 5]]
    assert [frame["n"].tolist() for frame in frames_of(batches, 3)["b"]] == [[2, 3, 4], [5]]


@pytest.mark.parametrize(("bytes_per_frame", "sizes"), [(2, [1] * 6), (50, [4, 2]), (10_000, [6]), (sys.maxsize, [6])])
def test_a_frame_has_a_limit_in_bytes(bytes_per_frame: int, sizes: list[int]) -> None:
    """It counts as rows of the mean size, here 13 bytes."""
    batches = [batch(["a"] * 3, n=pa.array([1, 2, 3])), batch(["a"] * 3, n=pa.array([4, 5, 6]))]
    frames = [list(rows) for *_, rows, _ in grouped(batches, KEY, form(bytes_per_frame=bytes_per_frame), ignore)]
    assert [[len(frame) for frame in of_a_key] for of_a_key in frames] == [sizes]


def test_rows_that_get_larger_make_smaller_frames() -> None:
    """A group that goes on keeps the rows that it has: none is lost, and none comes twice."""
    batches = [batch(["a"] * 3, s=pa.array(["x"] * 3)), batch(["a"] * 3, s=pa.array(["y" * 500] * 3))]
    [frames] = [list(rows) for *_, rows, _ in grouped(batches, KEY, form(bytes_per_frame=520), ignore)]
    assert ["".join(frame["s"].str[0]) for frame in frames] == ["xxxy", "yy"]


@pytest.mark.parametrize(
    ("value", "number"),
    [("1", 1), ("64m", 64 << 20), ("2147483647b", 2**31 - 1), ("3KB", 3072), ("0", sys.maxsize), ("-1", sys.maxsize)],
)
def test_a_limit_of_spark(value: str, number: int) -> None:
    """Zero and negative numbers mean no limit."""
    assert limit({"a": value}, "a") == number


def test_whole_numbers_for_a_column_of_decimals() -> None:
    """They become decimals where the session says so. Elsewhere Arrow refuses them, as on Spark."""
    output = StructType([StructField("d", DecimalType(10, 2))])
    frame = pd.DataFrame({"d": [12345]})
    [found] = converted([frame], output, form(decimals_of_ints=True))
    assert found.to_pylist() == [{"d": Decimal("12345.00")}]
    with pytest.raises(PySparkException):
        list(converted([frame], output, form()))


def test_nullable_whole_numbers_keep_their_type() -> None:
    """With the session's setting, a null does not make floats of them."""
    rows = [batch(["a", "a"], n=pa.array([2**60 + 1, None]))]
    [[frame]] = [list(frames) for *_, frames, _ in grouped(rows, KEY, form(extension_ints=True), ignore)]
    assert frame["n"].tolist() == [2**60 + 1, pd.NA]


def test_rows_that_nobody_reads_are_skipped() -> None:
    """The next group starts at its own first row."""
    batches = [batch(["a", "b"], n=pa.array([1, 2])), batch(["b", "c"], n=pa.array([3, 4]))]
    assert [key for _, key, _, _ in grouped(batches, KEY, form(), ignore)] == [("a",), ("b",), ("c",)]


def test_times_of_an_hour_that_a_clock_repeats_are_two_keys() -> None:
    """When daylight saving ends, two instants have the same local time. Each is a key, also within a struct."""
    at = [datetime(2024, 11, 3, hour, 30, tzinfo=UTC) for hour in (5, 6)]  # both are 01:30 in New York
    times = pa.array([at[0], at[0], at[1]], pa.timestamp("us", "America/New_York"))
    windows = pa.StructArray.from_arrays([times], ["start"])
    for column in (times, windows):
        rows = pa.record_batch({"at": column})
        key = from_arrow_schema(rows.schema)
        found = [len(list(group)) for *_, group, _ in grouped([rows], key, replace(form(), pandas=False), ignore)]
        assert found == [2, 1]


@pytest.mark.parametrize("pandas", [True, False])
def test_columns_whose_names_differ_in_case(pandas: bool) -> None:
    """The key is the column of exactly this name. Another case is only found if there is no doubt."""
    rows = pa.record_batch({"Key": pa.array(["x", "x"]), "key": pa.array(["a", "b"])})
    assert [key for _, key, _, _ in grouped([rows], KEY, replace(form(), pandas=pandas), ignore)] == [("a",), ("b",)]
    for names, found in ((["Key", "key"], "key"), (["KEY", "n"], "KEY"), (["Key", "KEY"], None), (["n"], None)):
        assert column_named("key", names) == found


def test_a_record_batch_with_only_late_rows_is_no_group() -> None:
    """The groups of the batches around it are frames as always."""
    batches = [batch([key], at=pa.array([ms], pa.timestamp("ms", "UTC"))) for key, ms in (("a", 6), ("b", 5), ("c", 7))]
    late: list[int] = []
    found = frames_of(list(in_time(batches, EventTime("at", False), 5, late.append)))
    assert ([*found], late) == (["a", "c"], [0, 1, 0])


def test_a_column_of_booleans_has_the_type_of_the_groups_values() -> None:
    """pandas has no boolean null, so a group without nulls has booleans and one with nulls has objects."""
    found = frames_of([batch(["a", "b", "b"], flag=pa.array([True, None, False]))])
    assert found["a"][0]["flag"].dtype == bool
    assert found["b"][0]["flag"].tolist() == [None, False]


def test_a_frame_belongs_to_the_processor() -> None:
    """A processor may add columns and change values, and the next group does not see this."""
    for number, (_, _, rows, _) in enumerate(grouped([batch(["a", "b"], n=pa.array([0, 1]))], KEY, form(), ignore)):
        for frame in rows:
            assert (list(frame.columns), frame["n"].tolist(), frame.index.tolist()) == (["key", "n"], [number], [0])
            assert (frame.columns.name, frame.index.name) == (None, None)
            frame.columns.name = frame.index.name = "own"
            frame["more"] = frame["n"] * 2
            frame.loc[0, "n"] = 7
            frame.iloc[:, 0] = "c"


@pytest.mark.parametrize("most", [1, 2, 10_000])
def test_yielded_frames_become_rows_in_their_order(most: int) -> None:
    """Frames of different shapes keep their order, whether they are gathered or not."""
    frames = [
        pd.DataFrame({"key": ["a"], "n": [1]}),
        pd.DataFrame({"key": ["b", None], "n": [2, 3]}),
        pd.DataFrame({"n": [4], "key": ["c"]}),  # columns are found by name
        pd.DataFrame({"key": ["d"], "n": [5.0]}),
        pd.DataFrame({"key": pd.Series([], dtype=object), "n": pd.Series([], dtype=float)}),
        pd.DataFrame({"key": ["e"], "n": [None]}),
    ]
    rows = [row for part in converted(iter(frames), OUTPUT, form(most)) for row in part.to_pylist()]
    expected = [("a", 1), ("b", 2), (None, 3), ("c", 4), ("d", 5), ("e", None)]
    assert [(row["key"], row["n"]) for row in rows] == expected


def test_a_processor_may_yield_one_frame_again_and_again() -> None:
    """Each yield has the values at that time."""

    def produced() -> Iterator[Any]:
        frame = pd.DataFrame({"key": ["a"], "n": [0]})
        for number in range(3):
            frame.loc[0, "n"] = number
            yield frame

    [part] = converted(produced(), OUTPUT, form())
    assert part.column("n").to_pylist() == [0, 1, 2]


def test_a_frame_that_needs_a_cast_is_cast_alone() -> None:
    """Text is read as a number, and one frame's values do not affect how another frame is read."""
    frames = [pd.DataFrame({"key": ["a"], "n": ["1"]}), pd.DataFrame({"key": ["b"], "n": pd.Series([2], dtype=object)})]
    rows = [row for part in converted(iter(frames), OUTPUT, form()) for row in part.to_pylist()]
    assert [row["n"] for row in rows] == [1, 2]


def test_an_empty_frame_is_nothing() -> None:
    """Its columns have no types yet, so it is skipped, as on Spark."""
    assert list(converted([pd.DataFrame({"key": [], "n": []})], OUTPUT, form())) == []


def test_a_frame_of_other_types_is_refused() -> None:
    """A frame with a wrong type is refused, and the error names its column."""
    frames = [pd.DataFrame({"key": ["a"], "n": [1]}), pd.DataFrame({"key": ["b"], "n": [1.5]})]
    with pytest.raises(Exception, match="the column 'n' with type 'float64'"):
        list(converted(iter(frames), OUTPUT, form()))


@pytest.mark.parametrize(
    ("pandas", "yielded", "message"),
    [
        (True, Row(key="a", n=1), "yielded Row, not a pandas.DataFrame"),
        (False, {"key": "a"}, "yielded dict, not a Row"),
    ],
)
def test_what_is_neither_a_row_nor_a_frame_is_refused(pandas: bool, yielded: Any, message: str) -> None:
    """The message names both types, because a timer that yields rows in pandas mode is easy to overlook."""
    with pytest.raises(InvalidError, match=message):
        list(converted(iter([yielded]), OUTPUT, replace(form(), pandas=pandas)))
