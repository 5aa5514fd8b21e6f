"""Aggregates of the rows of each key, and how they are added to stored ones. Pure.

Each column is converted before Arrow aggregates it: to the field's type, or for a sum to a type in which the sum of any
batch fits. So the result does not depend on where a batch ends, except that a float rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_integration.arrow_types import STORED, Column, converted, kind_of

#: Digits of a decimal of 256 bits that leave room for the sum of 10 billion rows, and for one addition.
_SUMMED, _ADDED = 65, 75


@dataclass(frozen=True)
class Aggregate:
    """How one function of ``merge`` works. The column may be of each kind that :data:`STORED` has for the field, of any
    kind for ``count``, or of Arrow's type null.

    ``kinds``: of the fields that can hold the result; for ``set``, of their items. ``function``: Arrow's name.
    ``combine``: stored values, and those of new rows → their aggregate, of the field's type or a wider one.
    """

    kinds: tuple[str, ...]
    function: str
    combine: Callable[[pa.Array, pa.Array], pa.Array]

    def prepared(self, column: Column, field: pa.DataType) -> Column:
        """What Arrow aggregates. Raises: ValueError for another kind, and for values that do not fit."""
        is_set = self.function == "distinct"
        of = field.value_type if is_set and pa.types.is_list(field) else field
        if kind_of(of) not in self.kinds or (is_set and of is field):
            raise ValueError(f"a field must be {'a list of ' if is_set else ''}{', '.join(self.kinds)}")
        if self.function == "count":
            return column
        if self.function == "sum":
            return _summable(column, of)
        items = converted(column, of)
        if not is_set:
            return items
        if not pa.types.is_floating(items.type):
            return items
        # -0.0 is 0.0, and there is one NaN
        items = pc.add(items, pa.scalar(0.0, items.type))
        return pc.if_else(pc.is_nan(items), pa.scalar(float("nan"), items.type), items)


def _summable(column: Column, field: pa.DataType) -> Column:
    """The same numbers, of a type in which Arrow's sum of them, which is not checked, cannot wrap around."""
    column = converted(column, field)
    if pa.types.is_decimal(field):
        return converted(column, pa.decimal256(_SUMMED, field.scale))
    if pa.types.is_floating(field):
        return converted(column, pa.float64())
    limits = [abs(limit) for limit in pc.min_max(column).as_py().values() if limit is not None]
    fits = max(limits, default=0) * len(column) < 1 << 63
    return column if fits else column.cast(pa.decimal256(_SUMMED, 0))


def _sum(before: pa.Array, new: pa.Array) -> pa.Array:
    wide = pa.decimal256(_ADDED, new.type.scale) if pa.types.is_decimal(new.type) else new.type
    wide = pa.int64() if pa.types.is_integer(wide) else wide
    own, before, new = before.type, before.cast(wide), new.cast(wide)
    total = pc.add_checked(before, new)
    if not pa.types.is_floating(own):
        return pc.coalesce(total, before, new)
    check_finite(total, pc.or_(pc.is_inf(before), pc.is_inf(new)))
    return converted(pc.coalesce(total, before, new), own)


def check_finite(sums: pa.Array, may_be: pa.Array | pa.Scalar) -> None:
    """Raises: ValueError for an infinite sum, if nothing that was added ``may_be`` infinite."""
    if bool(pc.any(pc.and_not(pc.is_inf(sums), may_be)).as_py()):
        raise ValueError("the sum is too large")


def _least(before: pa.Array, new: pa.Array) -> pa.Array:
    return _ordered(pc.min_element_wise, before, new)


def _greatest(before: pa.Array, new: pa.Array) -> pa.Array:
    return _ordered(pc.max_element_wise, before, new)


def _ordered(choose: Callable[[pa.Array, pa.Array], pa.Array], before: pa.Array, new: pa.Array) -> pa.Array:
    """Arrow compares no booleans here and no times with a zone, but the numbers that they are in memory."""
    of = before.type
    if not pa.types.is_boolean(of) and not pa.types.is_timestamp(of):
        return choose(before, new)
    number = pa.int8() if pa.types.is_boolean(of) else pa.int64()
    return choose(before.cast(number), new.cast(number)).cast(of)


def _union(before: pa.Array, new: pa.Array) -> pa.Array:
    """The items of both lists in each row, each once and in their order."""
    both = (before, new)
    rows = pa.concat_arrays([pc.list_parent_indices(lists) for lists in both])
    items = pa.concat_arrays([pc.list_flatten(lists) for lists in both])
    pairs = pa.table({"row": rows, "item": items}).filter(items.is_valid()).group_by(["row", "item"]).aggregate([])
    pairs = pairs.sort_by([("row", "ascending"), ("item", "ascending")])
    counts = np.bincount(pairs["row"].combine_chunks().to_numpy(), minlength=len(before))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pairs["item"].combine_chunks())


_ANY = tuple(STORED)
AGGREGATES: Mapping[str, Aggregate] = {
    "sum": Aggregate(("integer", "float", "decimal"), "sum", _sum),
    "count": Aggregate(("integer",), "count", _sum),
    "min": Aggregate(_ANY, "min", _least),
    "max": Aggregate(_ANY, "max", _greatest),
    "set": Aggregate(_ANY, "distinct", _union),
}
