"""Runs a ``StatefulProcessor`` over one task's rows of one micro-batch, on an executor.

Steps of :class:`ProcessorRun`:

1. ``init``, which finds the state variables in the task's store
2. ``handleInputRows`` for each group of rows; in event time, without late rows. In the first batch,
   ``handleInitialState`` for each row or frame of the key's initial state before that
3. ``handleExpiredTimer`` for each timer that has expired by the batch's time, or by its watermark
4. ``close``
5. delete the state whose TTL has passed

The clock is the batch's, so a repeated batch sees the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
from pyspark.sql.types import StructType

from spark_integration.context import StateContext
from spark_integration.processors import timers
from spark_integration.processors.group_state import GroupFunction
from spark_integration.processors.groups import EventTime, Form, grouped, in_time
from spark_integration.processors.handle import CLOSED, DATA_PROCESSED, INITIALIZED, TIMER_PROCESSED, StoredHandle
from spark_integration.processors.keys import decode_key
from spark_integration.processors.states import Batch, delete_expired, first_expiry, list_prefixes
from spark_integration.processors.variables import Variable
from spark_integration.processors.watermarks import Watermark, timed
from spark_integration.processors.yielded import converted, newer
from statemgr import Store


@dataclass(frozen=True)
class ProcessorRun:
    """The process function of a query with a processor. Spark ships it to the executors.

    ``variables``: those that ``init`` may ask for, with all versions of their schemas. ``output_time``: the output
    column whose times must be newer than the watermark. ``watermark``: the input's, if its rows say what it will be.
    """

    processor: StatefulProcessor
    store: str
    key: StructType
    output: StructType
    time_mode: str
    form: Form
    event_time: EventTime | None
    variables: Mapping[str, Variable]
    parsed: Mapping[str, StructType]
    output_time: EventTime | None = None
    watermark: Watermark | None = None

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        # as in Spark, the watermark is 0 where there is none yet
        late_ms = context.previous_watermark_ms or 0
        batch = Batch(stores[self.store], context.batch_time_ms)
        if self.watermark is not None:
            see = partial(context.see_time, delay_ms=self.watermark.delay_ms)
            batches = timed(batches, self.watermark.event_time, see)
        if self.event_time is not None:
            batches = in_time(batches, self.event_time, late_ms, context.count_late)
        produced = self._produced(batches, batch, self._times(batch, context))
        output = converted(produced, self.output, self.form)
        if self.output_time is not None:
            output = newer(output, self.output_time, late_ms)
        yield from output

    def next_due(self, stores: Mapping[str, Store]) -> int | None:
        """Return when the first timer or the first TTL expires by the clock, in epoch milliseconds."""
        if self.time_mode != "processingtime":
            return None
        store = stores[self.store]
        found = (timers.first(store), first_expiry(store))
        return min((time_ms for time_ms in found if time_ms is not None), default=None)

    def _produced(self, batches: Iterator[pa.RecordBatch], batch: Batch, times: TimerValues) -> Iterator[Any]:
        # 1. init
        handle = StoredHandle(batch, self.time_mode, self.variables, self.parsed)
        self.processor.init(handle)
        handle.phase = INITIALIZED
        # 2. rows
        for encoded, key, rows, is_input in grouped(batches, self.key, self.form, batch.coming):
            batch.set_key(encoded)
            if is_input:
                yield from self.processor.handleInputRows(key, rows, times)
                continue
            for state in rows:
                self.processor.handleInitialState(key, state, times)
        batch.coming(())
        # 3. timers
        handle.phase = DATA_PROCESSED
        yield from self._expired_timers(batch, times)
        # 4. close
        handle.phase = TIMER_PROCESSED
        batch.set_key(None)
        self.processor.close()
        handle.phase = CLOSED
        # 5. TTL
        delete_expired(batch, list_prefixes(self.variables.values()))

    def _times(self, batch: Batch, context: StateContext) -> TimerValues:
        if self.time_mode == "none" and not isinstance(self.processor, GroupFunction):
            return TimerValues()
        return TimerValues(batch.time_ms, context.watermark_ms or 0)

    def _expired_timers(self, batch: Batch, times: TimerValues) -> Iterator[Any]:
        if self.time_mode == "none":
            return
        by_event = self.time_mode == "eventtime"
        until_ms = times.getCurrentWatermarkInMs() if by_event else times.getCurrentProcessingTimeInMs()
        for encoded, time_ms in timers.expired(batch.store, until_ms):
            batch.set_key(encoded)
            key = self.key.fromInternal(decode_key(self.key, encoded)[0])
            yield from self.processor.handleExpiredTimer(key, times, ExpiredTimerInfo(time_ms))
            timers.delete(batch.store, encoded, time_ms)
