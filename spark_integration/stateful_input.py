"""Refuses an input that is no stream, and one for which Spark keeps its own state.

Spark keeps that state in the checkpoint location, independently of the published checkpoint. After a loss of the
location, a join or a deduplication in the input would start without state and give wrong rows. Such state belongs in a
store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spark_integration.location import Location
from spark_integration.sessions import JvmRefused, jvm_of, refuse_connect
from statemgr.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Operators of Spark's analysed plan that keep state if their input is a stream → how a user writes them.
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
#: The path of the state of a query's first stateful operator, in the checkpoint location.
_METADATA = "state/0/_metadata/metadata"


def check_streaming(rows: object) -> None:
    """Check that an input is a streaming DataFrame of this process. Raises: InvalidError."""
    refuse_connect(rows)  # before a call asks its server
    if not getattr(rows, "isStreaming", False):
        found = "a batch" if hasattr(rows, "columns") else type(rows).__name__
        raise InvalidError(
            f"the input is no streaming DataFrame, but {found}",
            hint="spark.readStream makes one. A batch has no state to keep: df.groupBy(…).transformWithState(…)",
        )


def check_stateless(rows: DataFrame) -> None:
    """Check a streaming DataFrame. Raises: InvalidError that names its first stateful operator.

    If the session does not let Python look at the plan, :func:`check_no_state` checks at the first batch instead.
    """
    try:
        with jvm_of(rows.sparkSession):
            found = _first_stateful(rows)
    except JvmRefused:
        return
    if found is not None:
        raise InvalidError(f"the input has an operator that keeps state in Spark: {found}", hint=_HINT)


def check_no_state(location: Location) -> None:
    """Check a query's checkpoint location. Raises: InvalidError if Spark keeps state in it."""
    if location.read(_METADATA) is not None:
        raise InvalidError(
            "the query has an operator that keeps state in Spark: there is some in its checkpoint location",
            hint=_HINT,
            location=location.uri,
        )


def _first_stateful(rows: Any) -> str | None:
    """Return the user's name of the first operator that keeps state, else None."""
    plan = rows._jdf.queryExecution().analyzed()  # without subqueries: Spark itself refuses streams there
    return next((found for node in nodes(plan) if (found := _stateful(node)) is not None), None)


def _stateful(node: Any) -> str | None:
    """Return the user's name of an operator that keeps state, else None."""
    name: str = node.nodeName()
    if name not in _STATEFUL and name not in _JOINS:
        return None
    streams = sum(bool(child.isStreaming()) for child in children(node))
    if name in _STATEFUL:
        return _STATEFUL[name] if streams else None
    return "a join of two streams" if streams > 1 else None


def nodes(plan: Any) -> Iterator[Any]:
    """Yield every node of a plan."""
    pending = [plan]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(children(node))


def children(node: Any) -> list[Any]:
    """Return the nodes whose rows a node of a plan takes."""
    found = node.children()
    return [found.apply(i) for i in range(found.size())]
