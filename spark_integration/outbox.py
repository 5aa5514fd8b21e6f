"""The stored output rows of a published batch, as a DataFrame that reads them on the executors.

They come from the attachments that the published checkpoints name, never from Spark's lineage: whatever Spark
recomputes, loses or runs twice, the rows are those of the attempts whose state was published.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_integration.attempt import OUTPUT
from spark_integration.failures import marked
from statemgr import JobConfig
from statemgr.engine import checkpoint_from_bytes, checkpoint_to_bytes, read_attachment
from statemgr.errors import RetryableError, StatemgrError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from statemgr import Checkpoint


def stored_rows(
    spark: SparkSession, config: JobConfig, checkpoints: Mapping[str, Checkpoint], schema: StructType
) -> DataFrame:
    """The output rows that ``checkpoints`` (task → checkpoint) name; reading it again gives the same rows."""
    with_rows = [checkpoint for checkpoint in checkpoints.values() if checkpoint.attachments]
    names = [(checkpoint_to_bytes(checkpoint),) for checkpoint in with_rows]
    if not names:
        return spark.createDataFrame([], schema)
    # one row per task; Spark spreads a local relation over the partitions it has cores for
    read = _reader(json.dumps(config.to_mapping()))
    return spark.createDataFrame(names, "checkpoint binary").mapInArrow(read, schema)


def _reader(mapping: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        config = JobConfig.from_mapping(json.loads(mapping))
        try:
            for batch in batches:
                for data in batch.column(0).to_pylist():
                    yield from _rows(config, data)
        except RetryableError as error:
            raise RetryableError(marked(error)) from error
        except StatemgrError as error:
            raise type(error)(marked(error)) from error

    return read


def _rows(config: JobConfig, checkpoint: bytes) -> Iterator[pa.RecordBatch]:
    for attachment in checkpoint_from_bytes(checkpoint).attachments:
        if attachment.name == OUTPUT:
            with pa.ipc.open_stream(pa.py_buffer(read_attachment(config, attachment))) as stream:
                yield from stream
