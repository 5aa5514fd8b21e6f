"""Translates the schema of a query's output between Spark and Arrow. Stored output rows carry their schema.

Later code that declares other columns may read the rows of a batch. So an Arrow IPC stream of output rows has Spark's
own schema in its metadata: Arrow's types alone do not distinguish all of Spark's types.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_integration.partitioning import column_named, quoted
from statemgr.errors import CorruptBlob, InvalidError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

log = logging.getLogger(__name__)
_KEY = b"statemgr.spark.schema"
#: Spark's types that read back exactly as they were written, including nulls.
_KNOWN = {
    "ArrayType", "BinaryType", "BooleanType", "ByteType", "DateType", "DayTimeIntervalType", "DecimalType",
    "DoubleType", "FloatType", "IntegerType", "LongType", "MapType", "NullType", "ShortType", "StringType",
    "StructType", "TimeType", "TimestampNTZType", "TimestampType", "VariantType",
}  # fmt: skip


def to_arrow(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of stored output rows, with Spark's own schema in its metadata. Timestamps are in UTC.

    Raises: InvalidError if there is no column, a column has a type that cannot be stored, or two have one name.
    """
    from pyspark.sql.pandas.types import to_arrow_schema

    for path, kind in types_in(schema):
        if type(kind).__name__ not in _KNOWN:
            raise InvalidError(
                f"the output schema has a column of type {kind.simpleString()}, which cannot be stored",
                hint="declare another type and convert the values in process: char and varchar to string, "
                "an interval of months to int",
                column=path,
            )
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise InvalidError("the output schema has two columns of one name", hint="rename one", column=twice[0])
    return to_arrow_schema(schema, timezone="UTC").with_metadata({_KEY: schema.json().encode()})


def of_stream(schema: pa.Schema) -> StructType:
    """Return Spark's schema of stored rows, from the schema of their stream. Raises: CorruptBlob."""
    from pyspark.sql.types import StructType

    try:
        return StructType.fromJson(json.loads((schema.metadata or {})[_KEY]))
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptBlob("stored output rows do not name the Spark schema that they were written with") from error


def can_be_local(schema: StructType) -> bool:
    """Whether PySpark can make an exact local relation of such rows.

    PySpark casts the table first, and PyArrow's cast refuses a null struct with fields that are not nullable, for
    example a variant.
    """
    structs = [schema]
    for _, kind in types_in(schema):
        if type(kind).__name__ == "VariantType":
            return False
        if type(kind).__name__ == "StructType":
            structs.append(kind)  # type: ignore[arg-type]
    return all(
        len({*struct.names}) == len(struct.names) and (struct is schema or all(field.nullable for field in struct))
        for struct in structs
    )


def as_declared(rows: DataFrame, schema: StructType, job: str) -> DataFrame:
    """Give stored rows the columns of a newer schema, with nulls in those that they lack.

    A column of another type is cast. It is null where Spark cannot do that, and for structs, whose fields Spark would
    cast by their position.
    """
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions

    changed = {}
    for column in schema:
        null = functions.lit(None).cast(column.dataType)
        name = column_named(column.name, rows.columns)
        if name is None:
            changed[column.name] = null
            continue
        was, now = rows.schema[name].dataType.simpleString(), column.dataType.simpleString()
        if was == now:
            continue
        log.warning(
            "%s: the output column %s was %s and is %s now: stored values are cast, or null where that is not possible",
            job, name, was, now,
        )  # fmt: skip
        changed[name] = null if "struct<" in was + now else rows[quoted(name)].try_cast(column.dataType)
        try:
            rows.select(changed[name])
        except AnalysisException:
            changed[name] = null
    return rows.withColumns(changed) if changed else rows


def types_in(schema: StructType) -> Iterator[tuple[str, DataType]]:
    """Yield every type in the schema, at any depth, with the path to it."""
    pending: list[tuple[str, DataType]] = [(field.name, field.dataType) for field in reversed(schema.fields)]
    while pending:
        path, kind = pending.pop()
        yield path, kind
        # by name: a user-defined type has the attributes of none of these
        match type(kind).__name__:
            case "ArrayType":
                pending.append((f"{path}.element", kind.elementType))  # type: ignore[attr-defined]
            case "MapType":
                pending.append((f"{path}.value", kind.valueType))  # type: ignore[attr-defined]
                pending.append((f"{path}.key", kind.keyType))  # type: ignore[attr-defined]
            case "StructType":
                pending.extend((f"{path}.{f.name}", f.dataType) for f in reversed(kind.fields))  # type: ignore[attr-defined]
