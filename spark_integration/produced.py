"""The rows that a process function yields: checked against the declared schema, and kept in a local file."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from statemgr.errors import DiskFull, InvalidError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def checked(produced: object, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The produced batches in exactly the declared schema. Raises: InvalidError."""
    if not isinstance(produced, Iterator):
        raise InvalidError(
            f"the process function returned {type(produced).__name__}, not an iterator of record batches",
            hint="use yield in it; one without output yields nothing: `yield from ()`",
        )
    for batch in produced:
        if not isinstance(batch, pa.RecordBatch):
            kind = type(batch).__name__
            raise InvalidError(f"the process function yielded {kind}, not a pyarrow.RecordBatch")
        yield _of_schema(batch, schema)


def write(batches: Iterator[pa.RecordBatch], path: Path) -> bool:
    """Write rows as an Arrow IPC stream, batch by batch; False, and no file, when there are none. Raises: DiskFull."""
    writer = None
    try:
        for batch in batches:
            if not batch.num_rows:
                continue
            with _disk_full(path):
                if writer is None:
                    options = pa.ipc.IpcWriteOptions(compression="zstd")
                    writer = pa.ipc.new_stream(str(path), batch.schema, options=options)
                writer.write_batch(batch)
    finally:
        if writer is not None:
            with _disk_full(path):
                writer.close()
    return writer is not None


@contextlib.contextmanager
def _disk_full(path: Path) -> Iterator[None]:
    # around writing alone: what the process function itself meets is not translated
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull("the local disk is full", hint="free space in state.dir", path=path) from error
        raise


def _of_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    try:
        fitting = batch if batch.schema.equals(schema) else batch.select(schema.names)
        # before the cast, which is silent about nulls or not, by version
        for field in schema:
            if not field.nullable and fitting.column(field.name).null_count:
                raise _null(field.name)
        if fitting is not batch:
            fitting = fitting.cast(schema)
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise InvalidError(
            f"the process function yielded rows that are not of the output schema: {error}",
            hint=f"declared: {_columns(schema)}; yielded: {_columns(batch.schema)}",
        ) from error
    for field in schema:
        found = _null_within(fitting.column(field.name), field, field.name)
        if found is not None:
            raise _null(found)
    return fitting


def _null_within(array: pa.Array, field: pa.Field, path: str) -> str | None:
    """The path of the first field that is not nullable and has a null where its parent has a value, or None."""
    if not field.nullable and array.null_count:
        return path
    kind = field.type
    if pa.types.is_struct(kind):
        present = array.drop_null()
        children = [(present.field(i), kind.field(i), f"{path}.{kind.field(i).name}") for i in range(kind.num_fields)]
    elif pa.types.is_map(kind):
        present = array.drop_null()
        first, last = present.offsets[0].as_py(), present.offsets[-1].as_py()
        children = [
            (present.keys.slice(first, last - first), kind.key_field, f"{path}.key"),
            (present.items.slice(first, last - first), kind.item_field, f"{path}.value"),
        ]
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        children = [(array.flatten(), kind.value_field, f"{path}.element")]
    else:
        return None
    return next((found for child in children if (found := _null_within(*child)) is not None), None)


def _null(column: str) -> InvalidError:
    return InvalidError(
        "the process function yielded a null in a column that is declared NOT NULL",
        hint="leave the row out, fill the value in, or declare the column without NOT NULL",
        column=column,
    )


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in schema)
