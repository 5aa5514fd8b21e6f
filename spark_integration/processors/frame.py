"""The output of a processor, as a streaming DataFrame of Spark without its stateful operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

from spark_integration.query import StatefulQuery
from spark_integration.writer import StatefulWriter
from statemgr.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: Methods of a DataFrame that return another DataFrame and keep no state.
_STATELESS = {
    "alias", "crossJoin", "drop", "dropna", "fillna", "filter", "hint", "join", "mapInArrow", "mapInPandas", "melt",
    "replace", "select", "selectExpr", "to", "toDF", "unpivot", "where", "withColumn", "withColumnRenamed",
    "withColumns", "withColumnsRenamed",
}  # fmt: skip
_STATEFUL = {
    "agg", "cube", "distinct", "dropDuplicates", "dropDuplicatesWithinWatermark", "drop_duplicates", "exceptAll",
    "groupBy", "groupby", "intersect", "intersectAll", "limit", "orderBy", "rollup", "sort", "subtract", "union",
    "unionAll", "unionByName", "withWatermark",
}  # fmt: skip


@dataclass(frozen=True)
class StatefulFrame:
    """The rows that a processor yields.

    ``select``, ``where`` and the other stateless methods of a DataFrame change them. A join takes a DataFrame that is
    not a stream. Name columns with ``pyspark.sql.functions.col``.
    """

    _query: StatefulQuery
    _mode: str

    @property
    def writeStream(self) -> StatefulWriter:
        """A writer of the output."""
        return StatefulWriter(self._query, self._mode)

    @property
    def schema(self) -> StructType:
        """The columns. Raises: AnalysisException if an argument does not fit; InvalidError without a session."""
        from pyspark.sql import SparkSession

        session = SparkSession.getActiveSession()
        if session is None:
            raise InvalidError("there is no active Spark session", hint="SparkSession.builder.getOrCreate()")
        return self._query.output_schema(session)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return self.schema.names

    def transform(self, func: Callable[..., StatefulFrame], *args: Any, **kwargs: Any) -> StatefulFrame:
        """Return ``func(self, …)``, like Spark's."""
        return func(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., StatefulFrame]:
        if name in _STATELESS:
            return partial(self._then, name)
        if name in _STATEFUL:
            raise InvalidError(
                f"{name} after stateful() would be a second operator with state",
                hint="write the output to a topic, and read it with another query; or do it within the processor",
            )
        raise AttributeError(f"a StatefulFrame has no attribute {name!r}")

    def _then(self, name: str, *args: Any, **kwargs: Any) -> StatefulFrame:
        if any(
            isinstance(other, StatefulFrame) or (isinstance(other, DataFrame) and other.isStreaming) for other in args
        ):
            raise InvalidError(f"{name} of two streams keeps state", hint="join a table that is no stream")
        return StatefulFrame(self._query.then(lambda rows: getattr(rows, name)(*args, **kwargs)), self._mode)
