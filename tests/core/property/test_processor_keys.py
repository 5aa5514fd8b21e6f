"""Keys of a processor's state: their bytes decode to the key, sort alike, and no key is a prefix of another."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from spark_integration.processors.keys import decode_key, encode_key

_TEXT = st.text(st.characters(codec="utf-8"), max_size=4) | st.sampled_from(["", "\x00", "\x00\x01", "a", "a\x00"])
#: A type, and values of it in Spark's internal form.
_COLUMNS: list[tuple[DataType, st.SearchStrategy[Any]]] = [
    (IntegerType(), st.integers(-(2**31), 2**31 - 1)),
    (LongType(), st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2)),
    (DoubleType(), st.floats(allow_nan=False)),
    (BooleanType(), st.booleans()),
    (StringType(), _TEXT),
    (BinaryType(), st.binary(max_size=4).map(bytearray)),
    (DecimalType(10, 2), st.integers(-(10**10) + 1, 10**10 - 1).map(lambda n: Decimal(n).scaleb(-2))),
    (DecimalType(38, 10), st.integers(-(10**38) + 1, 10**38 - 1).map(lambda n: Decimal(f"{n}e-10"))),
    (ArrayType(StringType()), st.lists(st.none() | _TEXT, max_size=3)),
    (StructType([StructField("x", LongType()), StructField("y", StringType())]), st.tuples(st.integers(-2, 2), _TEXT)),
]


@st.composite
def _keys(draw: st.DrawFn) -> tuple[StructType, tuple[Any, ...], tuple[Any, ...]]:
    columns = draw(st.lists(st.sampled_from(_COLUMNS), min_size=1, max_size=3))
    schema = StructType([StructField(f"c{i}", kind) for i, (kind, _) in enumerate(columns)])
    first, second = (tuple(draw(st.none() | values) for _, values in columns) for _ in range(2))
    return schema, first, second


def _rank(value: Any) -> Any:
    """Return a value that sorts as the bytes do: null first, then text by its UTF-8 bytes."""
    if value is None:
        return (0,)
    if isinstance(value, str):
        return (1, value.encode())
    if isinstance(value, list | tuple):
        return (1, [_rank(item) for item in value])
    return (1, value)


@given(_keys())
def test_bytes_of_keys(given_keys: tuple[StructType, tuple[Any, ...], tuple[Any, ...]]) -> None:
    """The bytes of two keys of the same types decode, sort correctly, and neither is a proper prefix of the other."""
    schema, first, second = given_keys
    one, other = encode_key(schema, first), encode_key(schema, second)
    assert decode_key(schema, b"xy" + one + b"\xff", 2) == (first, 2 + len(one))
    assert (one < other) == ([_rank(v) for v in first] < [_rank(v) for v in second])
    assert one == other or not other.startswith(one)


def test_floats_that_are_equal_for_spark() -> None:
    """All NaNs have the same bytes, and so do both zeros."""
    schema = StructType([StructField("x", DoubleType())])
    assert encode_key(schema, (-0.0,)) == encode_key(schema, (0.0,))
    assert encode_key(schema, (math.nan,)) == encode_key(schema, (-math.nan,))
    assert math.isnan(decode_key(schema, encode_key(schema, (math.nan,)))[0][0])
