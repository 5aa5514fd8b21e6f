"""Describes a batch's stage to Spark: its rows, spread over the tasks, and an attempt at each task.

PySpark describes a step of a DataFrame with up to twenty calls to the JVM, one after the other. From batch to batch,
only the input and the :class:`~spark_integration.attempt.Work` differ. So a :class:`Stage` keeps the Java objects of
all the rest, which are names of columns and belong to no DataFrame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spark_integration.attempt import RESULT, Work, worker
from spark_integration.partitioning import TASK_COLUMN, Partitioning
from spark_integration.placement import placed

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class Stage:
    """The stage of all batches whose input has the same columns.

    Args:
        job: the job's key.
        rows: any DataFrame with these columns.
        order: the columns that sort a task's rows.

    Raises: InvalidError if a column is missing, or has the name of the column that this adds.
    """

    def __init__(self, job: str, rows: DataFrame, partitioning: Partitioning, tasks: int, order: Sequence[str]) -> None:
        from pyspark.sql import functions
        from pyspark.sql.pandas.types import from_arrow_schema

        session: Any = rows.sparkSession
        self._context: Any = session.sparkContext
        self._job = job
        self._tasks = tasks
        task = functions.expr(partitioning.number(rows, tasks)).cast("int").alias(TASK_COLUMN)
        # the worker finds the column by its position: it is the last one
        self._numbered = self._seq([functions.col("*"), task])
        self._task = functions.col(TASK_COLUMN)._jc
        self._order = self._named(partitioning.quoted(rows, order)) if order else None
        self._input = self._named([*partitioning.quoted(rows, rows.columns), TASK_COLUMN])
        self._result = from_arrow_schema(RESULT)
        self._java_result = session._jsparkSession.parseDataType(self._result.json())
        self._java_function = getattr(
            self._context._jvm, "org.apache.spark.sql.execution.python.UserDefinedPythonFunction"
        )

    def spread(self, rows: DataFrame) -> DataFrame:
        """Add the task's number as the last column, and move each row to the partition of that number."""
        from pyspark.sql.dataframe import DataFrame

        spread = rows._jdf.select(self._numbered).repartitionById(self._tasks, self._task)
        if self._order is not None:
            spread = spread.sortWithinPartitions(self._order)
        return DataFrame(spread, rows.sparkSession)

    def run(self, spread: DataFrame, work: Work) -> list[Any]:
        """Run an attempt at each task on Spark's executors, as PySpark's ``mapInArrow`` and ``collect`` do.

        A task runs where it ran last.

        Returns: their results, with the columns of :data:`~spark_integration.attempt.RESULT`.
        """
        from pyspark.sql.dataframe import DataFrame
        from pyspark.sql.udf import _wrap_function
        from pyspark.util import PythonEvalType

        wrapped = _wrap_function(self._context, worker(work), self._result)
        function = self._java_function(
            "attempt", wrapped, self._java_result, PythonEvalType.SQL_MAP_ARROW_ITER_UDF, True
        )
        results = placed(self._job, spread)._jdf.mapInArrow(function.apply(self._input), False, None)
        return DataFrame(results, spread.sparkSession).collect()

    def _named(self, names: Sequence[str]) -> Any:
        from pyspark.sql import functions

        return self._seq([functions.col(name) for name in names])

    def _seq(self, columns: Sequence[Column]) -> Any:
        """A Scala sequence of columns."""
        return self._context._jvm.PythonUtils.toSeq([column._jc for column in columns])
