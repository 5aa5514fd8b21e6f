"""Refuses an input with which Spark keeps state of its own.

That state lives in the checkpoint location and knows nothing of the published checkpoint: once the location is lost,
a join or a deduplication in the input starts without it and gives wrong rows. Keep such state in a store instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spark_integration.location import Location
from statemgr.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Operators of Spark's analysed plan that keep state when their input is a stream → how a user writes them.
_STATEFUL = {
    "Aggregate": "an aggregation (groupBy, window, session_window)",
    "Deduplicate": "dropDuplicates",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark",
    "Distinct": "distinct",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState",
    "FlatMapGroupsWithState": "flatMapGroupsWithState or mapGroupsWithState",
    "GlobalLimit": "limit",
    "Intersect": "intersect",
    "Except": "except",
    "TransformWithState": "transformWithState",
    "TransformWithStateInPandas": "transformWithStateInPandas",
    "TransformWithStateInPySpark": "transformWithState",
}
_JOINS = {"Join", "AsOfJoin", "LateralJoin"}
_HINT = "keep this state in a store of the job, inside process: Spark's own is lost with the checkpoint location"
#: Where Spark keeps the state of a query's first stateful operator, below the checkpoint location.
_METADATA = "state/0/_metadata/metadata"


def check_stateless(rows: DataFrame) -> None:
    """Raises: InvalidError that names the first stateful operator of a streaming DataFrame.

    A session without access to the JVM is checked at its first batch instead, by :func:`check_no_state`.
    """
    plan = getattr(rows, "_jdf", None)
    if plan is None:
        return
    for node in _nodes(plan.queryExecution().analyzed()):
        found = _stateful(node)
        if found is not None:
            raise InvalidError(f"the input has an operator that keeps state in Spark: {found}", hint=_HINT)


def check_no_state(location: Location) -> None:
    """Raises: InvalidError when Spark keeps state of its own in the checkpoint location of a query."""
    if location.read(_METADATA) is not None:
        raise InvalidError(
            "the query has an operator that keeps state in Spark: there is some in its checkpoint location",
            hint=_HINT,
            location=location.uri,
        )


def _nodes(plan: Any) -> Iterator[Any]:
    """Every operator of a plan. Spark refuses streams in subqueries itself."""
    pending = [plan]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(_children(node))


def _stateful(node: Any) -> str | None:
    """What a user calls the operator, if it keeps state."""
    name: str = node.nodeName()
    if name not in _STATEFUL and name not in _JOINS:
        return None
    streams = sum(bool(child.isStreaming()) for child in _children(node))
    if name in _STATEFUL:
        return _STATEFUL[name] if streams else None
    return "a join of two streams" if streams > 1 else None


def _children(node: Any) -> list[Any]:
    children = node.children()
    return [children.apply(i) for i in range(children.size())]
