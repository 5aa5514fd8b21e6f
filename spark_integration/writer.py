"""``writeStream``: Spark's ``DataStreamWriter`` for the output of a stateful query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from spark_integration.brokers import BROKERS, are_same
from spark_integration.outputs import (
    FILE_FORMATS,
    ConsoleOutput,
    FileOutput,
    ForeachOutput,
    FormatOutput,
    KafkaOutput,
    MemoryOutput,
    TableOutput,
)
from statemgr.errors import InvalidError

if TYPE_CHECKING:
    from spark_integration.context import OutputFunction
    from spark_integration.outputs import Output
    from spark_integration.query import StatefulQuery
    from spark_integration.reports import OnBatch
    from spark_integration.running import RunningQuery
    from statemgr.engine import PermissionFlags

LOCATION = "checkpointLocation"


class StatefulWriter:
    """Writes a query's output. Its methods change and return the writer, as those of Spark's ``DataStreamWriter`` do.
    The last one of ``format``, ``foreach`` and ``foreachBatch`` counts.

    Args:
        mode: the query's output mode, if it is already chosen.
    """

    def __init__(self, query: StatefulQuery, mode: str | None = None) -> None:
        self._query = query
        self._mode = mode
        self._output: Output | None = None
        self._format: str | None = None
        self._partition_by: tuple[str, ...] = ()
        self._name: str | None = None
        self._options: dict[str, str] = {}

    # --- where the rows go ----------------------------------------------------------------------------------------

    def foreachBatch(self, func: OutputFunction) -> StatefulWriter:
        """Call ``func(df, sequence)`` for each batch.

        The sequence replaces Spark's batch ID: it continues after a loss of the checkpoint location. A sequence may be
        repeated, and then has the same rows.
        """
        self._output, self._format = func, None
        return self

    def foreach(self, f: Any) -> StatefulWriter:
        """Call ``f(row)``, or an object's methods, on the executors.

        The methods are ``open(partition_id, sequence)``, ``process(row)`` and ``close(error)``. Raises: InvalidError if
        ``f`` is neither a function nor such an object.
        """
        self._output, self._format = ForeachOutput(f, self._query.config.tasks), None
        return self

    def format(self, source: str) -> StatefulWriter:
        """Set the format: ``kafka``, a file format, ``memory``, ``console``, or any format of Spark's batch writer."""
        self._output, self._format = None, source.lower()
        return self

    def partitionBy(self, *cols: str | Sequence[str]) -> StatefulWriter:
        """Set the columns whose values become directories, or one list of them."""
        names = cols[0] if len(cols) == 1 and not isinstance(cols[0], str) else cols
        self._partition_by = tuple(map(str, names))
        return self

    # --- the query ------------------------------------------------------------------------------------------------

    def outputMode(self, outputMode: str) -> StatefulWriter:
        """Set append or update, which write the same rows.

        Raises: InvalidError for another mode, or if it differs from the one of ``applyInPandasWithState``.
        """
        mode = outputMode.lower()
        if mode not in ("append", "update"):
            raise InvalidError(f"the output mode {outputMode!r} cannot be used", hint="use append or update")
        if self._mode not in (None, mode):
            raise InvalidError(
                f"the output mode is {outputMode!r} here and {self._mode!r} in applyInPandasWithState",
                hint="give both the same",
            )
        return self

    def queryName(self, queryName: str) -> StatefulWriter:
        """Set the query's name in Spark, which also names the view of the format ``memory``."""
        self._name = queryName
        self._query = self._query.queryName(queryName)
        return self

    def trigger(self, **trigger: Any) -> StatefulWriter:
        """Set the trigger as ``DataStreamWriter.trigger`` does, without continuous processing."""
        self._query = self._query.trigger(**trigger)
        return self

    def option(self, key: str, value: Any) -> StatefulWriter:
        """Set an option of the query or of the format."""
        return self.options(**{key: value})

    def options(self, **options: Any) -> StatefulWriter:
        """Set several options."""
        self._query = self._query.options(**options)
        for key, value in options.items():
            if key.lower() != LOCATION.lower():
                self._options[key] = str(value).lower() if isinstance(value, bool) else str(value)
        return self

    def on_batch(self, report: OnBatch) -> StatefulWriter:
        """Like :meth:`StatefulQuery.on_batch`. Spark has no such method."""
        self._query = self._query.on_batch(report)
        return self

    # --- start ----------------------------------------------------------------------------------------------------

    def start(
        self,
        path: str | None = None,
        format: str | None = None,  # noqa: A002
        outputMode: str | None = None,
        partitionBy: str | Sequence[str] | None = None,
        queryName: str | None = None,
        **permissions: Unpack[PermissionFlags],
    ) -> RunningQuery:
        """Start the query.

        Args:
            path: the directory, for formats that have one; also the option ``path``.
            format, outputMode, partitionBy, queryName: as the methods of these names.
            permissions: as for :meth:`StatefulQuery.start`. Set options with :meth:`option`.

        Raises: InvalidError if the format needs something else; as :meth:`StatefulQuery.start`, and what the
            processor's ``init`` raises.
        """
        self._set(format, outputMode, partitionBy, queryName)
        return self._start(self._of_format(path) if self._format else self._output, permissions)

    def toTable(
        self,
        tableName: str,
        format: str | None = None,  # noqa: A002
        outputMode: str | None = None,
        partitionBy: str | Sequence[str] | None = None,
        queryName: str | None = None,
        **permissions: Unpack[PermissionFlags],
    ) -> RunningQuery:
        """Start the query with its output in a table, and create the table if needed. Raises: as :meth:`start`."""
        self._set(format, outputMode, partitionBy, queryName)
        job = self._query.config.job_key
        return self._start(TableOutput(tableName, job, self._format, self._partition_by, self._options), permissions)

    def _set(self, kind: str | None, mode: str | None, columns: str | Sequence[str] | None, name: str | None) -> None:
        if mode is not None:
            self.outputMode(mode)
        if columns is not None:
            self.partitionBy(columns)
        if kind is not None:
            self.format(kind)
        if name is not None:
            self.queryName(name)

    def _start(self, output: Output | None, permissions: PermissionFlags) -> RunningQuery:
        query = self._query if output is None else self._query.output(output)
        return query.start(**permissions)

    def _of_format(self, path: str | None) -> Output:
        assert self._format is not None
        job, given = self._query.config.job_key, {name.lower(): value for name, value in self._options.items()}
        options = {name: value for name, value in self._options.items() if name.lower() != "path"}
        path = path or given.get("path")
        if self._format == "memory":
            if self._name is None:
                raise InvalidError("the format memory needs a name for its view", hint=".queryName('totals')")
            return MemoryOutput(self._name, self._query.session())
        if self._format == "console":
            return ConsoleOutput(int(given.get("numrows", 20)), given.get("truncate", "true") == "true")
        if self._format == "kafka":
            return self._of_kafka(given)
        if self._format not in FILE_FORMATS:
            return FormatOutput(self._format, job, path, self._partition_by, options)
        if path is None:
            raise InvalidError(f"the format {self._format} needs a directory", hint=".start('file:///data/totals')")
        return FileOutput(path, self._format, job, self._partition_by, options)

    def _of_kafka(self, options: dict[str, str]) -> Output:
        """Records in the transaction of the state, unless the option names brokers that are not the job's."""
        own = str(self._query.config.kafka_client("producer")["bootstrap.servers"])
        if not are_same(options.get(BROKERS, ""), own):
            return FormatOutput("kafka", self._query.config.job_key, None, (), options)
        lost = sorted(name for name in options if name.startswith("kafka.") and name != BROKERS)
        if lost:
            raise InvalidError(
                f"the option {lost[0]} has no effect, because the job's own producer sends the records",
                hint="remove the option; settings of the producer have the prefix kafka.producer. in the configuration",
                option=lost[0],
            )
        return KafkaOutput(options.get("topic"))
