"""``StatefulProcessorHandle`` on a store, and the driver's handle, which finds out what ``init`` declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql.streaming.stateful_processor import ListState, MapState, StatefulProcessorHandle, ValueState
from pyspark.sql.types import StructType

from spark_integration.processors import timers
from spark_integration.processors.keys import check_key_types
from spark_integration.processors.refusals import refusal
from spark_integration.processors.states import Batch, Cells, StoredList, StoredMap, StoredValue, delete_variable
from spark_integration.processors.values import check_value_types, is_nullable
from spark_integration.processors.variables import LIST, MAP, VALUE, Declared, Variable
from statemgr.errors import InvalidError

#: Time modes as Spark prints them, by their lower-case names.
TIME_MODES = {"none": "NoTime", "processingtime": "ProcessingTime", "eventtime": "EventTime"}
#: The phases of a processor in Spark's order.
PRE_INIT, CREATED, INITIALIZED, DATA_PROCESSED, TIMER_PROCESSED, CLOSED = range(6)
_PHASES = ("PRE_INIT", "CREATED", "INITIALIZED", "DATA_PROCESSED", "TIMER_PROCESSED", "CLOSED")
_STATE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE"


class Handle(StatefulProcessorHandle):
    """The common parts of both handles: which calls are allowed when, and the declared variables."""

    def __init__(self, time_mode: str, phase: int) -> None:
        self.phase = phase
        self.declared: dict[str, Variable] = {}
        #: The names that ``init`` has deleted, with the declaration where it was declared before.
        self.deleted: dict[str, Variable | None] = {}
        self._time_mode = time_mode
        self._cells_of: dict[str, Cells] = {}

    def getValueState(
        self,
        stateName: str,
        schema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> ValueState:
        cells = self._declare(VALUE, stateName, schema, None, ttlDurationMs)
        return StoredValue(cells)

    def getListState(
        self,
        stateName: str,
        schema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> ListState:
        cells = self._declare(LIST, stateName, schema, None, ttlDurationMs)
        return StoredList(cells)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        cells = self._declare(MAP, stateName, valueSchema, userKeySchema, ttlDurationMs)
        key = self.declared[stateName].key
        assert key is not None
        return StoredMap(cells, key)

    def _declare(
        self, kind: str, name: str, schema: StructType | str, key: StructType | str | None, ttl_ms: int | None
    ) -> Cells:
        doing = f"initializing {kind} state"
        self._check_init(doing, f"get_{kind}_state")
        if ttl_ms is not None and ttl_ms <= 0:
            condition = "STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE"
            raise refusal(doing, condition, operation=f"get_{kind}_state", name=name)
        if ttl_ms is not None and self._time_mode != "processingtime":
            condition = "STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL"
            raise refusal(doing, condition, name=name, mode=TIME_MODES[self._time_mode])
        if name in self.declared:
            raise refusal(doing, "STATEFUL_PROCESSOR_DUPLICATE_STATE_VARIABLE_DEFINED", name=name)
        if name in self.deleted:
            raise InvalidError(
                f"init declares the state variable {name!r} after it has deleted it, so each batch would delete it",
                hint="leave deleteIfExists out, or declare a variable of another name",
                variable=name,
            )
        values = self._schema(schema)
        keys = None if key is None else self._schema(key)
        self.declared[name] = Variable(name, kind, (values,), keys, ttl_ms)
        self._cells_of[name] = self._cells(self.declared[name])
        return self._cells_of[name]

    def deleteIfExists(self, stateName: str) -> None:
        self._check_init("deleting state", "delete_if_exists")
        self.deleted[stateName] = self.declared.pop(stateName, None)
        if stateName in self._cells_of:
            self._cells_of[stateName].is_deleted = True
        self._delete(stateName)

    def _check_init(self, doing: str, operation: str) -> None:
        if self.phase > CREATED:
            raise refusal(doing, _STATE, operation=operation, state=_PHASES[self.phase])

    def _check_timers(self, doing: str, operation: str) -> None:
        if self._time_mode == "none":
            condition = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE"
            raise refusal(doing, condition, operation=operation, mode=TIME_MODES[self._time_mode])
        if not INITIALIZED <= self.phase < TIMER_PROCESSED:
            raise refusal(doing, _STATE, operation=operation, state=_PHASES[self.phase])

    def _schema(self, given: StructType | str) -> StructType:
        raise NotImplementedError

    def _cells(self, variable: Variable) -> Cells:
        raise NotImplementedError

    def _delete(self, name: str) -> None:
        raise NotImplementedError


class Discovery(Handle):
    """The driver's handle. It records what ``init`` declares, and has neither state nor timers."""

    def __init__(self, time_mode: str) -> None:
        super().__init__(time_mode, PRE_INIT)
        self._parsed: dict[str, StructType] = {}

    def found(self, *, nullable: bool = False) -> Declared:
        """Return the declarations.

        Args:
            nullable: all fields of values must be nullable, as Spark wants it if its own state has Avro's format.

        Raises: InvalidError for a type that cannot be stored; PySparkRuntimeError for a field that is not nullable.
        """
        for variable in self.declared.values():
            what = f"the state variable {variable.name!r}"
            if nullable and not is_nullable(variable.schema):
                condition = "TRANSFORM_WITH_STATE_SCHEMA_MUST_BE_NULLABLE"
                raise refusal("initializing state", condition, name=variable.name, schema=variable.schema.json())
            check_value_types(variable.schema, what)
            if variable.key is not None:
                check_key_types(variable.key, what)
        return Declared(self.declared, self.deleted, self._parsed)

    def _schema(self, given: StructType | str) -> StructType:
        if not isinstance(given, str):
            return _struct(given)
        parsed = _struct(StructType.fromDDL(given))
        self._parsed[given] = parsed
        return parsed

    def _cells(self, variable: Variable) -> Cells:
        return _NoCells(variable)

    def _delete(self, name: str) -> None:
        pass

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._check_timers("register timer", "register_timer")

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._check_timers("deleting timer", "delete_timer")

    def listTimers(self) -> Iterator[int]:
        self._check_timers("listing timers", "list_timers")
        return iter(())


class StoredHandle(Handle):
    """The executor's handle, for one task and one batch.

    Args:
        variables: name → the variable with all versions of its schema, from the checkpoint's record.
        parsed: DDL text → schema, from the driver.
    """

    def __init__(
        self, batch: Batch, time_mode: str, variables: Mapping[str, Variable], parsed: Mapping[str, StructType]
    ) -> None:
        super().__init__(time_mode, CREATED)
        self._batch = batch
        self._variables = variables
        self._parsed = parsed

    def _schema(self, given: StructType | str) -> StructType:
        if not isinstance(given, str):
            return _struct(given)
        if given not in self._parsed:
            raise _undiscovered(f"the schema {given!r}")
        return self._parsed[given]

    def _cells(self, variable: Variable) -> Cells:
        known = self._variables.get(variable.name)
        if known is None or (known.kind, known.schema, known.key) != (variable.kind, variable.schema, variable.key):
            raise _undiscovered(f"the {variable.kind} state {variable.name!r}")
        return Cells(self._batch, known)

    def _delete(self, name: str) -> None:
        delete_variable(self._batch.store, name)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._check_timers("register timer", "register_timer")
        timers.register(self._batch.store, self._batch.key("register timer"), expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._check_timers("deleting timer", "delete_timer")
        timers.delete(self._batch.store, self._batch.key("deleting timer"), expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        self._check_timers("listing timers", "list_timers")
        return timers.of_key(self._batch.store, self._batch.key("listing timers"))


class _NoCells(Cells):
    """A variable on the driver, which has neither a grouping key nor a store."""

    def __init__(self, variable: Variable) -> None:
        self.name, self.kind = variable.name, variable.kind

    def place(self, doing: str) -> bytes:
        raise refusal(doing, "INTERNAL_ERROR", reason="Implicit key not found in state store")


def _struct(given: Any) -> StructType:
    if not isinstance(given, StructType):
        raise InvalidError(
            f"the schema of a state variable is {given!r}, not a struct",
            hint="such as StructType([StructField('count', LongType())]), or 'count bigint'",
        )
    return given


def _undiscovered(what: str) -> InvalidError:
    return InvalidError(
        f"init declared {what} on an executor, but not on the driver",
        hint="init must declare the same variables wherever it runs",
    )
