"""Checks the rows that a process function yields against the declared schema, and writes them to local files."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from statemgr.errors import DiskFull, InvalidError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: Bytes after which the next file of rows begins. Files are read at once, and blobs have a size limit.
PART_BYTES = 64 * 1024 * 1024
#: Bytes of rows that are written at once.
_SLICE_BYTES = 16 * 1024 * 1024


def checked(produced: object, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Convert the batches to exactly the declared schema. Raises: InvalidError."""
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


def write(batches: Iterable[pa.RecordBatch], directory: Path, schema: pa.Schema) -> list[Path]:
    """Write rows as Arrow IPC streams, batch by batch, to files of about 64 MiB. Raises: DiskFull.

    Returns: the files in the order of the rows; none if there are no rows.
    """
    slices = (part for batch in batches for part in _slices(batch))
    paths: list[Path] = []
    following = next(slices, None)
    while following is not None:
        paths.append(directory / f"rows-{len(paths)}.arrows")
        with _part(paths[-1], schema) as (file, writer):
            while following is not None and file.tell() < PART_BYTES:
                with _disk_full(directory):
                    writer.write_batch(following)
                following = next(slices, None)
    return paths


@contextlib.contextmanager
def _part(path: Path, schema: pa.Schema) -> Iterator[tuple[pa.OSFile, pa.ipc.RecordBatchStreamWriter]]:
    """One open file of rows, and its writer."""
    closing = contextlib.ExitStack()
    try:
        with _disk_full(path.parent):
            file = pa.OSFile(str(path), "wb")
            closing.callback(file.close)
            writer = pa.ipc.new_stream(file, schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))
            closing.callback(writer.close)
        yield file, writer
    finally:
        with _disk_full(path.parent):
            closing.close()


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch into batches of a bounded size. Yield nothing for a batch without rows."""
    if not batch.num_rows:
        return
    rows = max(1, batch.num_rows * _SLICE_BYTES // max(batch.nbytes, _SLICE_BYTES))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


@contextlib.contextmanager
def _disk_full(path: Path) -> Iterator[None]:
    # translate only errors of writing, not those of the process function
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull("the local disk is full", hint="free space in state.dir", path=path) from error
        raise


def _of_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    try:
        fitting = batch if batch.schema.equals(schema) else batch.select(schema.names)
        # before the cast, because some versions cast nulls silently
        for field in schema:
            if not field.nullable and fitting.column(field.name).null_count:
                raise _null(field.name)
        if fitting is not batch:
            columns = [_cast(fitting.column(field.name), field.type) for field in schema]
            fitting = pa.RecordBatch.from_arrays(columns, schema=schema)
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


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    # even a cast to its own type refuses a null struct with fields that are not nullable
    return column if column.type.equals(kind) else column.cast(kind)


def _null_within(array: pa.Array, field: pa.Field, path: str) -> str | None:
    """Return the path of the first non-nullable field that is null although its parent has a value, or None."""
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
