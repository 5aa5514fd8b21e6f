"""``stateful(df, keys…)``: Spark's ``groupBy(keys…)`` for processors whose state statemgr keeps.

Runs unchanged ``StatefulProcessor`` classes, and functions with a ``GroupState``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from spark_integration.processors.frame import StatefulFrame
from spark_integration.processors.group_state import TIMEOUTS, GroupedFunction, GroupFunction
from spark_integration.processors.handle import TIME_MODES
from spark_integration.processors.program import ProcessorProgram, output_time
from spark_integration.query import StatefulQuery, parsed_schema
from spark_integration.stateful_input import check_streaming
from statemgr import JobConfig, StateManager
from statemgr.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from spark_integration.query import InputFunction

_OUTPUT_MODES = ("append", "update")
#: The methods of a processor that are called.
_METHODS = ("init", "handleInputRows", "handleExpiredTimer", "handleInitialState", "close")


def stateful(
    source: InputFunction | DataFrame,
    *keys: str | Column,
    config: JobConfig,
    store: str | None = None,
    manager: Callable[[JobConfig, str], StateManager] = StateManager,
) -> StatefulGroups:
    """Group a stream over Kafka by columns, as ``df.groupBy(*keys)`` does.

    Args:
        source: a function from ``startingOffsets`` to a streaming DataFrame, or such a DataFrame, as for
            :meth:`StatefulQuery.input`.
        keys: columns: their names, or ``F.col("id")`` and ``df["id"]``.
        config: the job. ``job.tasks`` is the number of state partitions.
        store: the store for the processor's state, which nothing else may write to. May be left out if the job has
            only one.

    Raises: InvalidError if there is no key, if a key is no column, and for a DataFrame that is no stream.
    """
    if not keys:
        raise InvalidError("stateful needs a column to group by", hint="stateful(df, 'id', config=config)")
    if not callable(source):
        check_streaming(source)
    names = tuple(map(_name, keys))
    return StatefulGroups(StatefulQuery(config, manager).input(source).key_by(*names), names, store)


def _name(key: object) -> str:
    """Return the name of a column to group by. That the input has it is checked later."""
    if isinstance(key, str):
        return key
    if isinstance(key, Column):
        return str(key).removeprefix("Column<'").removesuffix("'>").strip("`")  # of an expression, its text
    raise InvalidError(f"{key!r} is no column to group by", hint="stateful(df, 'id', config=config)")


@dataclass(frozen=True)
class StatefulGroups:
    """A stream grouped by key, with the methods of Spark's ``GroupedData`` that keep arbitrary state."""

    _query: StatefulQuery
    _keys: tuple[str, ...]
    _store: str | None

    def transformWithState(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: Any = None,
        eventTimeColumnName: str = "",
    ) -> StatefulFrame:
        """Like Spark's: the processor takes and yields ``Row`` objects.

        ``initialState`` is ``df.groupBy(…)`` by the same columns. ``handleInitialState`` gets its rows in the first
        batch that is published for the job, and never again.

        With ``eventTimeColumnName``, a batch fails if the processor yields a row that is not newer than the watermark
        of the batch before.

        Raises: InvalidError for an unknown mode, and for a column that has no event time.
        """
        return self._transformed(
            statefulProcessor, outputStructType, outputMode, timeMode, initialState, eventTimeColumnName, pandas=False
        )

    def transformWithStateInPandas(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: Any = None,
        eventTimeColumnName: str = "",
    ) -> StatefulFrame:
        """Like :meth:`transformWithState`, with pandas data frames instead of rows."""
        return self._transformed(
            statefulProcessor, outputStructType, outputMode, timeMode, initialState, eventTimeColumnName, pandas=True
        )

    def applyInPandasWithState(
        self,
        func: GroupedFunction,
        outputStructType: StructType | str,
        stateStructType: StructType | str,
        outputMode: str,
        timeoutConf: str,
    ) -> StatefulFrame:
        """Like Spark's: ``func(key, frames, state)`` yields data frames, and ``state`` is a ``GroupState``.

        Raises: InvalidError for an unknown mode or timeout.
        """
        if timeoutConf not in TIMEOUTS:
            raise InvalidError(f"there is no timeout {timeoutConf!r}", hint=f"there are {', '.join(TIMEOUTS)}")
        if not callable(func):
            raise InvalidError(
                f"applyInPandasWithState takes a function, not {func!r}", hint="pass func(key, frames, state)"
            )
        processor = GroupFunction(func, parsed_schema(stateStructType), timeoutConf)
        return self._transformed(processor, outputStructType, outputMode, TIMEOUTS[timeoutConf], None, "", pandas=True)

    def _transformed(
        self,
        processor: StatefulProcessor,
        output: StructType | str,
        output_mode: str,
        time_mode: str,
        initial_state: Any,
        event_time_column: str,
        *,
        pandas: bool,
    ) -> StatefulFrame:
        missing = [name for name in _METHODS if not callable(getattr(processor, name, None))]
        if missing or isinstance(processor, type):
            raise InvalidError(
                f"{processor!r} is no stateful processor",
                hint="pass an object of a subclass of pyspark.sql.streaming.StatefulProcessor, such as Counts()",
            )
        mode, time = output_mode.lower(), time_mode.lower()
        if mode not in _OUTPUT_MODES:
            raise InvalidError(f"the output mode {output_mode!r} cannot be used", hint="use Append or Update")
        if time not in TIME_MODES:
            raise InvalidError(
                f"there is no time mode {time_mode!r}", hint="there are None, ProcessingTime and EventTime"
            )
        schema = parsed_schema(output)
        time_column = output_time(schema, event_time_column) if event_time_column else None
        program = ProcessorProgram(processor, self._keys, schema, time, pandas, self._store, initial_state, time_column)
        # as on Spark, a writer must repeat the mode of a function, and not the one of a processor
        checked = mode if isinstance(processor, GroupFunction) else None
        return StatefulFrame(self._query.run_program(program, schema), checked)
