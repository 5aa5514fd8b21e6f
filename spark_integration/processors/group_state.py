"""``applyInPandasWithState`` as a stateful processor with one value state, and at most one timer per key.

As in Spark 4.2, a call that updates or removes the state also ends the timeout of its key, unless it sets another one.
A call that changes nothing keeps the timeout. A timeout that has passed then comes again in each batch. A key times
out once the clock, or the watermark, is beyond its timeout, so its timer is a millisecond later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from spark_integration.processors.timers import LAST_MS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

#: Spark's timeouts, and the time modes of processors with the same clock.
TIMEOUTS = {
    GroupStateTimeout.NoTimeout: "none",
    GroupStateTimeout.ProcessingTimeTimeout: "processingtime",
    GroupStateTimeout.EventTimeTimeout: "eventtime",
}
#: The state variable.
STATE = "state"
#: ``function(key, frames, state)`` yields data frames.
GroupedFunction = Callable[[tuple[Any, ...], Iterable[Any], GroupState], Iterable[Any]]


class GroupFunction(StatefulProcessor):
    """Calls a function with a ``GroupState``. ``timeout`` is one of :data:`TIMEOUTS`."""

    def __init__(self, function: GroupedFunction, schema: StructType, timeout: str) -> None:
        self.function = function
        self._schema = schema
        self._timeout = timeout
        self._columns: list[str] = []
        self._has_watermark = False

    def of(self, rows: DataFrame, *, has_watermark: bool) -> GroupFunction:
        """Return the same function for an input. A call for a timeout gets an empty frame with the input's columns."""
        bound = copy(self)
        bound._columns, bound._has_watermark = rows.columns, has_watermark
        return bound

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._value = handle.getValueState(STATE, self._schema)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        return self._called(key, rows, timerValues, None)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        import pandas as pd

        frames = [pd.DataFrame(columns=self._columns)]
        return self._called(tuple(key), frames, timerValues, expiredTimerInfo.getExpiryTimeInMs())

    def _called(self, key: Any, frames: Iterable[Any], times: Any, expired_ms: int | None) -> Iterator[Any]:
        """Call the function. ``expired_ms`` is the expired timer, which is deleted after the call."""
        old = self._value.get()
        state = GroupState(
            optionalValue=old,  # type: ignore[arg-type]  # any tuple will do
            batchProcessingTimeMs=times.getCurrentProcessingTimeInMs(),
            eventTimeWatermarkMs=times.getCurrentWatermarkInMs(),
            timeoutConf=self._timeout,
            hasTimedOut=expired_ms is not None,
            watermarkPresent=self._has_watermark,
            defined=old is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=GroupState.NO_TIMESTAMP,
            keyAsUnsafe=b"",
            valueSchema=self._schema,
        )
        yield from self.function(key, frames, state)
        if state._updated:
            self._value.update(state.get)
        elif state._removed:
            self._value.clear()
        if self._timeout == GroupStateTimeout.NoTimeout:
            return
        has_timeout = state._timeout_timestamp != GroupState.NO_TIMESTAMP
        if not (state._updated or state._removed or has_timeout):
            if expired_ms is not None:
                self._handle.registerTimer(expired_ms - 1)
            return
        for time_ms in list(self._handle.listTimers()):
            self._handle.deleteTimer(time_ms)
        if has_timeout:
            self._handle.registerTimer(min(int(state._timeout_timestamp) + 1, LAST_MS))
