"""Makes a DataFrame of a published batch's stored output rows, and fetches all of them before it calls the output.

The rows come from the attachments that the published checkpoints name, never from Spark's lineage. Whatever Spark
recomputes, loses or runs twice, they are the rows of the attempts whose state was published. They keep the columns that
they were written with, even if the query has changed since.

If there are few rows, the driver fetches them and makes a local relation, which needs no Python worker. It can do so
while their commits are published. Otherwise, the executors fetch them and keep them in Spark's storage. Either way, a
missing blob is an error here, before the output has replaced or deleted anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_integration.failures import marked
from spark_integration.output_schema import can_be_local, of_stream
from spark_integration.sessions import is_on
from statemgr import JobConfig
from statemgr.engine import checkpoint_from_bytes, checkpoint_to_bytes, read_attachment, read_attachments
from statemgr.errors import CorruptBlob, RetryableError, StatemgrError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from statemgr import Checkpoint
    from statemgr.engine import Attachment

#: Limits up to which the driver fetches the rows of a batch: stored bytes, and decompressed bytes.
DRIVER_BYTES = 4 * 1024 * 1024
_DECODED_BYTES = 32 * 1024 * 1024
#: The most rows in one partition of a local relation.
_PARTITION_ROWS = 10_000


@contextmanager
def stored_rows(
    spark: SparkSession, config: JobConfig, checkpoints: Mapping[str, Checkpoint], declared: StructType
) -> Iterator[DataFrame]:
    """Return the output rows that ``checkpoints`` (task → checkpoint) name. Reading them again gives the same rows.

    Args:
        declared: the schema to use if the batch has no rows.

    Raises: MissingBlob, CorruptBlob, UnavailableError, AccessDenied; inside Spark's exception if an executor raised it.
    """
    parts = [
        (checkpoint, attachment)
        for _, checkpoint in sorted(checkpoints.items())
        for attachment in checkpoint.attachments
        if attachment.is_output
    ]
    if not parts:
        yield spark.createDataFrame([], declared)
        return
    attachments = [attachment for _, attachment in parts]
    few = local_rows(spark, config, attachments)
    if few is not None:
        yield few
        return
    with pa.ipc.open_stream(read_attachment(config, min(attachments, key=_size))) as stream:
        schema = stream.schema
    names = [checkpoint_to_bytes(_naming(checkpoint, attachment)) for checkpoint, attachment in parts]
    # one row per stored part; Spark spreads a local relation over as many partitions as it has cores
    local = _local(spark, pa.table({"checkpoint": pa.array(names, pa.binary())}))
    reader = _reader(json.dumps(config.to_mapping()), schema.serialize().to_pybytes())
    rows = local.mapInArrow(reader, of_stream(schema)).persist()
    try:
        rows.write.format("noop").mode("overwrite").save()  # fetches all rows
        yield rows
    finally:
        rows.unpersist()


def local_rows(spark: SparkSession, config: JobConfig, attachments: Sequence[Attachment]) -> DataFrame | None:
    """Return the output rows in ``attachments`` as a local relation.

    Returns: None if there are no rows, too many rows, or types that a local relation cannot have.
    Raises: as :func:`stored_rows`.
    """
    stored = [one for one in attachments if one.is_output]
    if sum(map(_size, stored)) > DRIVER_BYTES:
        return None
    table = _fetched(config, stored, _DECODED_BYTES)
    if table is None or not can_be_local(of_stream(table.schema)):
        return None
    return _local(spark, table, of_stream(table.schema))


def fetched_rows(
    spark: SparkSession, config: JobConfig, attachments: Sequence[Attachment], declared: StructType
) -> DataFrame:
    """Fetch the output rows of commits that are not published yet, on the driver.

    Args:
        declared: their schema.

    Raises: as :func:`stored_rows`.
    """
    table = _fetched(config, [one for one in attachments if one.is_output], sys.maxsize)
    return spark.createDataFrame([], declared) if table is None else _local(spark, table, declared)


def _local(spark: SparkSession, table: pa.Table, schema: StructType | None = None) -> DataFrame:
    """Return a table as a local relation, as PySpark's ``createDataFrame`` does.

    That asks the JVM for eight settings first, with 30 calls. Only this one changes anything: stored timestamps are in
    UTC.
    """
    session: Any = spark
    large = is_on(spark.conf, "spark.sql.execution.arrow.useLargeVarTypes")
    rows: DataFrame = session._create_from_arrow_table(
        table, schema or table.schema.names, "UTC", False, large, _PARTITION_ROWS
    )
    return rows


def _size(attachment: Attachment) -> int:
    return attachment.blob.size if attachment.blob else len(attachment.inline or b"")


def _naming(checkpoint: Checkpoint, attachment: Attachment) -> Checkpoint:
    """A copy of a checkpoint that names only one attachment."""
    return replace(checkpoint, attachments=(attachment,), state_checkpoint_markers={}, input_offsets={}, batch=None)


def _fetched(config: JobConfig, attachments: Sequence[Attachment], limit: int) -> pa.Table | None:
    """Fetch all rows on the driver. Return None if they have more than ``limit`` bytes once they are decompressed."""
    batches: list[pa.RecordBatch] = []
    left = limit
    for data in read_attachments(config, attachments):
        with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
            _check_same(stream.schema, batches[0].schema if batches else stream.schema)
            for batch in stream:
                left -= batch.nbytes
                if left < 0:
                    return None
                batches.append(batch)
    return pa.Table.from_batches(batches) if batches else None


def _check_same(schema: pa.Schema, expected: pa.Schema) -> None:
    if not schema.equals(expected, check_metadata=True):
        raise CorruptBlob("the stored output rows of one batch have different schemas")


def _reader(mapping: str, expected: bytes) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        config = JobConfig.from_mapping(json.loads(mapping))
        schema = pa.ipc.read_schema(pa.py_buffer(expected))
        try:
            for batch in batches:
                for data in batch.column(0).to_pylist():
                    yield from _rows(config, data, schema)
        except RetryableError as error:
            raise RetryableError(marked(error)) from error
        except StatemgrError as error:
            raise type(error)(marked(error)) from error

    return read


def _rows(config: JobConfig, checkpoint: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for attachment in checkpoint_from_bytes(checkpoint).attachments:
        with pa.ipc.open_stream(pa.py_buffer(read_attachment(config, attachment))) as stream:
            _check_same(stream.schema, schema)
            yield from stream
