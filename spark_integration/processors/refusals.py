"""Refusals of Spark's handle, with Spark's exceptions and texts. Pure.

Source of the conditions: ``error-conditions.json`` of Spark 4.2.
"""

from __future__ import annotations

from typing import Any

_TEXTS = {
    "ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE": (
        "Illegal value provided to the State Store Cannot write empty list values to State Store for StateName {name}.",
        "42601",
    ),
    "INTERNAL_ERROR": ("{reason}", "XX000"),
    "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE": (
        "Failed to perform stateful processor operation={operation} with invalid handle state={state}.",
        "42802",
    ),
    "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE": (
        "Failed to perform stateful processor operation={operation} with invalid timeMode={mode}",
        "42802",
    ),
    "STATEFUL_PROCESSOR_DUPLICATE_STATE_VARIABLE_DEFINED": (
        "State variable with name {name} has already been defined in the StatefulProcessor.",
        "42802",
    ),
    "STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL": (
        "Cannot use TTL for state={name} in timeMode={mode}, use TimeMode.ProcessingTime() instead.",
        "42802",
    ),
    "STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE": (
        "TTL duration must be greater than zero for State store operation={operation} on state={name}.",
        "42802",
    ),
    "TRANSFORM_WITH_STATE_SCHEMA_MUST_BE_NULLABLE": (
        "If Avro encoding is enabled, all the fields in the schema for column family {name} must be nullable when "
        "using the TransformWithState operator. Please make the schema nullable. Current schema: {schema}",
        "XXKST",
    ),
}


def refusal(doing: str, condition: str, **parts: Any) -> Exception:
    """Return Spark's exception for ``condition`` while ``doing`` something."""
    from pyspark.errors import PySparkRuntimeError

    text, state = _TEXTS[condition]
    return PySparkRuntimeError(f"Error {doing}: [{condition}] {text.format(**parts)} SQLSTATE: {state}")


def not_initialized(doing: str, kind: str, name: str) -> Exception:
    """Return Spark's exception for the use of a state variable that ``init`` has deleted."""
    from pyspark.errors import PySparkRuntimeError

    return PySparkRuntimeError(f"Error {doing}: {kind.capitalize()} state {name} is not initialized.")
