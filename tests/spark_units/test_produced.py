"""Rows that a process function yields: they fit the declared schema, respect NOT NULL, and are kept."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spark_integration import produced
from spark_integration.produced import checked, write
from statemgr.errors import DiskFull, InvalidError


def required(name: str, kind: pa.DataType) -> pa.Field:
    """Return a field that may not be null."""
    return pa.field(name, kind, nullable=False)


NESTED = pa.schema(
    [
        required("key", pa.string()),
        pa.field("place", pa.struct([required("x", pa.int64()), pa.field("y", pa.int64())])),
        pa.field("tags", pa.list_(required("element", pa.string()))),
        pa.field("sizes", pa.map_(pa.string(), required("value", pa.int32()))),
    ]
)
GOOD: dict[str, Any] = {"key": "a", "place": {"x": 1, "y": None}, "tags": ["t"], "sizes": [("s", 1)]}


def rows(*changes: dict[str, Any]) -> pa.RecordBatch:
    """Return one good row with each of the changes, as a slice of a longer batch."""
    whole = pa.RecordBatch.from_pylist([GOOD, *({**GOOD, **change} for change in changes), GOOD], schema=NESTED)
    return whole.slice(1, len(changes))


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"key": None}, "key"),
        ({"place": {"x": None, "y": 1}}, "place.x"),
        ({"tags": ["t", None]}, "tags.element"),
        ({"sizes": [("s", None)]}, "sizes.value"),
    ],
)
def test_a_null_in_a_column_that_is_not_null(change: dict[str, Any], column: str) -> None:
    """A null is refused, even within structs, lists and maps, and the error names the column."""
    with pytest.raises(InvalidError, match="NOT NULL") as caught:
        list(checked(iter([rows({}, change)]), NESTED))
    assert caught.value.where == {"column": column}
    # in a batch without a schema every column may be null, and the cast must not hide a null
    if column == "key":
        loose = pa.RecordBatch.from_pydict({"key": ["a", None]})
        with pytest.raises(InvalidError, match="NOT NULL"):
            list(checked(iter([loose]), pa.schema([required("key", pa.string())])))


def test_nulls_where_they_may_be() -> None:
    """A nullable parent may itself be null, and rows outside the slice do not count."""
    fine = rows({}, {"place": None, "tags": None, "sizes": None})
    whole = pa.RecordBatch.from_pylist([{**GOOD, "tags": [None], "sizes": [("s", None)]}, GOOD], schema=NESTED)
    assert list(checked(iter([fine, whole.slice(1)]), NESTED)) == [fine, whole.slice(1)]


def test_columns_are_put_in_order_and_cast() -> None:
    """The columns of a plain dictionary fit a schema with NOT NULL if they have no nulls."""
    schema = pa.schema([required("a", pa.int32()), pa.field("b", pa.string())])
    (batch,) = checked(iter([pa.RecordBatch.from_pydict({"b": [None], "a": [1], "c": [1]})]), schema)
    assert batch.schema.equals(schema)
    with pytest.raises(InvalidError, match="declared: a int32 not null, b string; yielded: a string"):
        list(checked(iter([pa.RecordBatch.from_pydict({"a": ["x"], "b": ["y"]})]), schema))


def test_many_rows_are_spread_over_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large batch is cut into slices, each file ends after its share, and together they have the rows in order."""
    monkeypatch.setattr(produced, "PART_BYTES", 4_000)
    monkeypatch.setattr(produced, "_SLICE_BYTES", 2_000)
    batch = pa.RecordBatch.from_pydict({"a": [os.urandom(8) for _ in range(2_000)]})

    paths = write([batch.slice(0, 0), batch], tmp_path, batch.schema)

    assert len(paths) > 3
    assert max(path.stat().st_size for path in paths) < 4_000 + 2 * 2_000
    assert pa.concat_tables([pa.ipc.open_stream(path.read_bytes()).read_all() for path in paths]) == pa.table(batch)
    assert write([batch.slice(0, 0)], tmp_path, batch.schema) == []


def test_a_null_struct_of_required_fields(tmp_path: Path) -> None:
    """If another column needs a cast, a struct with the right type is not changed."""
    struct = pa.struct([required("x", pa.int64())])
    schema = pa.schema([pa.field("n", pa.int32()), pa.field("s", struct)])
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2]), pa.array([{"x": 1}, None], struct)], ["n", "s"])
    (fitting,) = checked(iter([batch]), schema)
    assert fitting.to_pylist() == [{"n": 1, "s": {"x": 1}}, {"n": 2, "s": None}]
    assert fitting.schema == schema


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_full_disk(tmp_path: Path) -> None:
    """A full disk raises DiskFull. An error of the process function itself stays unchanged."""
    batch = pa.RecordBatch.from_pydict({"a": list(range(100_000))})
    (tmp_path / "rows-0.arrows").symlink_to("/dev/full")
    with pytest.raises(DiskFull):
        write([batch], tmp_path, batch.schema)

    def own() -> Iterator[pa.RecordBatch]:
        raise OSError(errno.ENOSPC, "another disk")
        yield

    with pytest.raises(OSError, match="another disk"):
        write(own(), tmp_path, batch.schema)


def test_without_the_extra() -> None:
    """The error on import names the extra to install."""
    program = "import sys; sys.modules['pyarrow'] = None\nfrom spark_integration import StatefulQuery"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert "PrerequisiteMissing: spark_integration needs pyarrow" in done.stderr
    assert "pip install 'statemgr[spark]'" in done.stderr
