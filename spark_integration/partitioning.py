"""Spreads rows over tasks: by the hash of a key, or by Kafka partition.

Spark computes the number of the task (:meth:`Partitioning.number`), and the worker checks it again
(:meth:`Partitioning.check`), because Spark silently wraps numbers that are too large and sends null to task 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from statemgr.errors import InvalidError, LayoutMismatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The column with the number of a row's task.
TASK_COLUMN = "__statemgr_task"


@dataclass(frozen=True, slots=True)
class Partitioning:
    """Chooses the task of a row: ``by_key`` by ``pmod(hash(columns), N)`` (Spark's Murmur3), else by Kafka's partition.

    Without ``by_key``, the only column is Kafka's partition. A null key is a key like any other:
    Spark's hash of null is constant, so all null keys share one task.
    """

    columns: tuple[str, ...]
    by_key: bool

    def name(self, rows: DataFrame) -> str:
        """The partitioner's name in every checkpoint: ``kafka-partition``, or ``spark-hash(bigint,string)``.

        It includes the key's types, because equal values of different types have different hashes.
        Raises: InvalidError as :meth:`quoted`.
        """
        names = self.quoted(rows, self.columns)
        if not self.by_key:
            return "kafka-partition"
        return f"spark-hash({','.join(field.dataType.simpleString() for field in rows.select(*names).schema)})"

    def number(self, rows: DataFrame, tasks: int) -> str:
        """Spark's expression for the number of a row's task. Raises: InvalidError as :meth:`quoted`."""
        names = self.quoted(rows, self.columns)
        return f"pmod(hash({', '.join(names)}), {tasks})" if self.by_key else names[0]

    @staticmethod
    def quoted(rows: DataFrame, columns: Sequence[str]) -> list[str]:
        """Quote the names of columns that the rows have.

        Raises: InvalidError if a column is missing or the reserved name is taken.
        """
        names = rows.columns
        if column_named(TASK_COLUMN, names) is not None:
            raise InvalidError("the input has a column of a reserved name", column=TASK_COLUMN)
        found = []
        for column in columns:
            name = column_named(column, names)
            if name is None:
                raise InvalidError(
                    "the input has no such column to partition by",
                    hint=f"its columns are {', '.join(names)}",
                    column=column,
                )
            found.append(quoted(name))
        return found

    def check(self, batch: pa.RecordBatch, task: int, tasks: int) -> pa.RecordBatch:
        """Check the task's number in every row, and remove the column.

        Raises: LayoutMismatch, InvalidError if a row is not this task's.
        """
        numbers = batch.column(batch.num_columns - 1)
        if numbers.null_count:
            raise InvalidError(
                "a row has no partition",
                hint="the column must be Kafka's own partition",
                column=self.columns[0],
            )
        if batch.num_rows and not pc.all(pc.equal(numbers, task)).as_py():
            foreign = pc.filter(numbers, pc.not_equal(numbers, task))[0].as_py()
            if not 0 <= foreign < tasks:
                raise _too_many_partitions(foreign, tasks)
            raise LayoutMismatch("a row reached another task than its own", task=task, belongs_to=foreign)
        return batch.drop_columns([batch.schema.names[-1]])

    def offsets_of_tasks(self, tasks: int, offsets: Mapping[str, int]) -> list[Mapping[str, int]]:
        """Return the input offsets of each task's checkpoint.

        They cover the task's own partition, or with ``by_key`` all partitions (all tasks then share one mapping).

        Raises: LayoutMismatch if the input has a partition that no task owns.
        """
        if self.by_key:
            return [offsets] * tasks
        own: list[dict[str, int]] = [{} for _ in range(tasks)]
        for name, offset in offsets.items():
            number = int(name.rpartition("-")[2])
            if number >= tasks:
                raise _too_many_partitions(number, tasks)
            own[number][name] = offset
        return list(own)


def column_named(name: str, columns: Sequence[str]) -> str | None:
    """Return the column of this name, or else the only one whose name differs in case alone; None without one."""
    if name in columns:
        return name
    alike = [column for column in columns if column.lower() == name.lower()]
    return alike[0] if len(alike) == 1 else None


def quoted(column: str) -> str:
    """Quote the name of a column so that Spark can parse it."""
    return "`" + column.replace("`", "``") + "`"


def _too_many_partitions(number: int, tasks: int) -> LayoutMismatch:
    return LayoutMismatch(
        f"the input has a row of Kafka partition {number}, but the job has {tasks} tasks (0 to {tasks - 1})",
        hint="use key_by when the topic has more partitions than the job has tasks",
        partition=number,
        tasks=tasks,
    )
