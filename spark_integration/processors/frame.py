"""The output of a processor, as a streaming DataFrame of Spark without its stateful operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame, SparkSession

from spark_integration.partitioning import quoted
from spark_integration.query import StatefulQuery
from spark_integration.writer import StatefulWriter
from statemgr.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: Methods of a DataFrame that return another DataFrame and keep no state.
_STATELESS = {
    "alias", "coalesce", "crossJoin", "drop", "dropna", "fillna", "filter", "hint", "join", "mapInArrow", "mapInPandas",
    "melt", "repartition", "repartitionByRange", "replace", "sample", "select", "selectExpr", "sortWithinPartitions",
    "to", "toDF", "unpivot", "where", "withColumn", "withColumnRenamed", "withColumns", "withColumnsRenamed",
    "withMetadata",
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
    not a stream. ``frame["n"]`` and ``frame.n`` are columns.

    ``_mode``: the output mode that a writer must repeat; None for any.
    """

    _query: StatefulQuery
    _mode: str | None

    @property
    def writeStream(self) -> StatefulWriter:
        """A writer of the output."""
        return StatefulWriter(self._query, self._mode)

    @property
    def schema(self) -> StructType:
        """The columns. Raises: AnalysisException if an argument does not fit; InvalidError without a session."""
        return self._query.output_schema(self.sparkSession)

    @property
    def sparkSession(self) -> SparkSession:
        """The active session. Raises: InvalidError if there is none."""
        session = SparkSession.getActiveSession()
        if session is None:
            raise InvalidError("there is no active Spark session", hint="SparkSession.builder.getOrCreate()")
        return session

    @property
    def isStreaming(self) -> bool:
        """True: the rows come from a stream."""
        return True

    @property
    def dtypes(self) -> list[tuple[str, str]]:
        """The names and the types of the columns."""
        return [(field.name, field.dataType.simpleString()) for field in self.schema.fields]

    def printSchema(self, level: int | None = None) -> None:
        """Print the columns as a tree."""
        self.sparkSession.createDataFrame([], self.schema).printSchema(level)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return self.schema.names

    def transform(self, func: Callable[..., StatefulFrame], *args: Any, **kwargs: Any) -> StatefulFrame:
        """Return ``func(self, …)``, like Spark's."""
        return func(self, *args, **kwargs)

    def __getitem__(self, item: Any) -> Any:
        """Return a column by its name or position; the rows that fulfil a condition; or some columns of a list."""
        if isinstance(item, Column):
            return self._then("filter", item)
        if isinstance(item, list | tuple):
            return self._then("select", *item)
        from pyspark.sql import functions

        columns = self.columns
        if isinstance(item, int) and -len(columns) <= item < len(columns):
            item = columns[item]
        if not isinstance(item, str) or item.lower() not in [name.lower() for name in columns]:
            raise InvalidError(
                f"the output of the processor has no column {item!r}", hint=f"it has {', '.join(columns)}"
            )
        return functions.col(quoted(item))

    def __getattr__(self, name: str) -> Any:
        if name in _STATELESS:
            return partial(self._then, name)
        if name in _STATEFUL:
            raise InvalidError(
                f"{name} after stateful() would be a second operator with state",
                hint="write the output to a topic, and read it with another query; or do it within the processor",
            )
        if not name.startswith("_") and hasattr(DataFrame, name):
            raise InvalidError(
                f"{name} is not possible for the output of a processor, which is a stream",
                hint="use writeStream; in foreachBatch, the rows of a batch are a DataFrame with all methods",
            )
        if not name.startswith("_") and name in self.columns:
            return self[name]
        raise AttributeError(f"a StatefulFrame has no attribute {name!r}")

    def _then(self, name: str, *args: Any, **kwargs: Any) -> StatefulFrame:
        if any(
            isinstance(other, StatefulFrame) or (isinstance(other, DataFrame) and other.isStreaming)
            for other in (*args, *kwargs.values())
        ):
            raise InvalidError(f"{name} of two streams keeps state", hint="join a table that is no stream")
        return StatefulFrame(self._query.then(lambda rows: getattr(rows, name)(*args, **kwargs)), self._mode)
