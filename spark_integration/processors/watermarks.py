"""The watermark of an input: which column of its rows it follows, and how far behind it is.

Spark computes a watermark from the rows of the batches before, and keeps it in the checkpoint location. The record of a
processor's state has it, too, so that a query continues with it at a new location.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from spark_integration.processors.groups import EventTime, micros
from spark_integration.processors.initial import IS_INPUT
from spark_integration.sessions import JvmRefused, jvm_of
from spark_integration.stateful_input import children, nodes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Spark's metadata of the column that has a watermark.
WATERMARK = "spark.watermarkDelayMs"
_NODE = "EventTimeWatermark"


@dataclass(frozen=True)
class Watermark:
    """A watermark that is ``delay_ms`` behind the newest time in a column."""

    event_time: EventTime
    delay_ms: int


def watermark_of(rows: DataFrame) -> Watermark | None:
    """Return the watermark of a streaming DataFrame, if its own rows say what it will be.

    Returns: None if there are several or none, if the rows are mixed with rows of a stream that does not count, if they
        have not kept the column, or if the session does not let Python look at the plan.
    """
    try:
        with jvm_of(rows.sparkSession):
            plan = rows._jdf.queryExecution().analyzed()
            marked = _marked(plan)
            if marked is None:
                return None
            output, wanted = plan.output(), marked.eventTime().exprId()
            kept = [field for i, field in enumerate(rows.schema) if output.apply(i).exprId().equals(wanted)]
    except JvmRefused:
        return None
    if not kept:
        return None
    event_time = EventTime(kept[0].name, isinstance(kept[0].dataType, StructType))
    return Watermark(event_time, int(kept[0].metadata[WATERMARK]))


def _marked(plan: Any) -> Any | None:
    """Return the plan's node with the watermark; None unless all rows of streams come from that one."""
    node = plan
    while node.nodeName() != _NODE:
        streams = [child for child in children(node) if child.isStreaming()]
        if len(streams) != 1:
            return None
        node = streams[0]
    return node if sum(one.nodeName() == _NODE for one in nodes(node)) == 1 else None


def timed(
    batches: Iterable[pa.RecordBatch], event_time: EventTime, see: Callable[[int], None]
) -> Iterator[pa.RecordBatch]:
    """Yield the batches. ``see`` gets the newest time in the input of each, in epoch milliseconds."""
    for batch in batches:
        times = micros(batch, event_time)
        if IS_INPUT in batch.schema.names:
            times = times.filter(batch.column(IS_INPUT))
        newest = pc.max(times).as_py()
        if newest is not None:
            see(newest // 1000)
        yield batch
