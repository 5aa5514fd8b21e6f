"""Which Arrow columns a field takes, and checked conversions. Pure.

Arrow's own casts turn texts into numbers and numbers into texts, read a time without a zone as UTC, and make infinity
of a number that is too large. Its sums wrap around, and some of its functions crash with some types. So a column that
is stored or merged is converted to the field's type first, by :data:`STORED`, and no function sees any other type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

#: A column, as a record batch or a table has it.
Column: TypeAlias = pa.Array | pa.ChunkedArray
_TEXT, _BINARY = (
    ("string", "large_string", "string_view"),
    ("binary", "large_binary", "binary_view", "fixed_size_binary"),
)
_KINDS = {
    "boolean": ("boolean",), "integer": ("integer",), "float": ("floating",), "decimal": ("decimal",),
    "date": ("date",), "text": _TEXT, "binary": _BINARY,
}  # fmt: skip
_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
#: The kind of a field → the kinds of columns that it takes. A value that the field's type cannot hold is refused.
STORED: Mapping[str, tuple[str, ...]] = {
    "boolean": ("boolean",),
    "integer": ("integer",),
    "float": ("float", "integer"),
    "decimal": ("decimal", "integer"),
    "text": ("text", "binary"),
    "binary": ("binary", "text"),
    "date": ("date",),
    "time": ("time",),
    "local time": ("local time",),
}


def kind_of(arrow: pa.DataType) -> str:
    """The kind of a type, such as integer or text. Of any other type: its name."""
    if pa.types.is_timestamp(arrow):
        return "time" if arrow.tz else "local time"
    for kind, checks in _KINDS.items():
        if any(getattr(pa.types, f"is_{check}")(arrow) for check in checks):
            return kind
    return str(arrow)


def plain(column: Column) -> Column:
    """The values themselves, if the column is a dictionary, runs, a view, or of an extension type."""
    if isinstance(column, pa.ChunkedArray):
        chunks = column.chunks or [pa.nulls(0, column.type)]
        return pa.chunked_array([plain(chunk) for chunk in chunks]) if _is_wrapped(column.type) else column
    if isinstance(column, pa.DictionaryArray):
        return plain(column.dictionary).take(column.indices)
    if isinstance(column, pa.ExtensionArray):
        return plain(column.storage)
    if pa.types.is_run_end_encoded(column.type):
        return plain(pc.run_end_decode(column))
    # Arrow cannot group, compare or take views
    return column.cast(_VIEWS[column.type]) if column.type in _VIEWS else column


def converted(column: Column, arrow: pa.DataType) -> Column:
    """The same values with another type.

    Raises: ValueError for a column of another kind than :data:`STORED` allows, and for a value that does not fit.
    """
    column = plain(column)
    if column.type == arrow or pa.types.is_null(column.type):
        return column.cast(arrow)
    if kind_of(column.type) not in STORED.get(kind_of(arrow), ()):
        raise ValueError(f"it is {column.type}, not {arrow}")
    if pa.types.is_decimal(arrow) and pa.types.is_integer(column.type):
        column = column.cast(pa.decimal256(76, arrow.scale))  # Arrow looks at the types of whole numbers, not at them
    found = column.cast(arrow)
    if pa.types.is_floating(column.type) and bool(pc.any(pc.and_(pc.is_inf(found), pc.is_finite(column))).as_py()):
        raise ValueError(f"a number does not fit into {arrow}")
    return found


def _is_wrapped(arrow: pa.DataType) -> bool:
    checks = (pa.types.is_dictionary, pa.types.is_run_end_encoded)
    return isinstance(arrow, pa.BaseExtensionType) or arrow in _VIEWS or any(check(arrow) for check in checks)
