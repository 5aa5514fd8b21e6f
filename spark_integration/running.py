"""A running stateful query: Spark's ``StreamingQuery``, with statemgr's typed errors and reports."""

from __future__ import annotations

import atexit
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.sql.streaming.query import StreamingQuery

from spark_integration import story
from spark_integration.driver import Driver
from spark_integration.failures import find
from spark_integration.progress import explained, with_state
from spark_integration.reports import BatchReport, StatefulQueryListener
from statemgr import StateManager
from statemgr.engine import Scratch
from statemgr.errors import BatchMismatch, InvalidError, StatemgrError

if TYPE_CHECKING:
    from pyspark.errors import StreamingQueryException
    from pyspark.sql.streaming.listener import StreamingQueryProgress

_UNLISTED_PARTITIONS = "you must specify all TopicPartitions"
_OTHER_SOURCES = "sources in the checkpoint offsets and now there are"


def other_partitions(text: str) -> InvalidError:
    """The error for Spark's text about starting offsets that are not those of the input's partitions."""
    found = re.search(r"Specified: (.*?) Assigned: (.*)", text)
    specified, assigned = (set(re.findall(r"[\w.-]+-\d+", part)) for part in (found.groups() if found else ("", "")))
    says = f"; Spark says: {found[0].split(' SQLSTATE')[0][:500]}" if found else ""
    if specified - assigned:
        return InvalidError(
            "the input does not read all partitions of the checkpoint",
            hint="read them as before. To leave out a topic, take starting_offsets.for_topics(…) of the others in the "
            f"callable, and start once with allow_skipped_input=True{says}",
        )
    return InvalidError(
        "the input has partitions that the checkpoint does not know",
        hint=f"name them in the callable: starting_offsets.including('orders-4'){says}",
    )


class RunningQuery(StreamingQuery):
    """The result of ``start()``."""

    def __init__(self, query: StreamingQuery, driver: Driver, manager: StateManager, own: Scratch | None) -> None:
        super().__init__(query._jsq)
        if own is not None:
            atexit.register(own.close)
        self._own = own
        self._driver = driver
        self._manager = manager
        self._told = False

    @property
    def recentBatches(self) -> tuple[BatchReport, ...]:  # noqa: N802 - Spark's style, like Spark's names
        """Reports of up to 100 batches, fewer for a job with more than 200 tasks, oldest first."""
        return tuple(self._driver.observers.recent)

    @property
    def lastBatch(self) -> BatchReport | None:  # noqa: N802
        """The report of the last batch; None before the first one has ended."""
        return next(reversed(self.recentBatches), None)

    @property
    def recentProgress(self) -> list[StreamingQueryProgress]:  # noqa: N802
        """Like Spark's, with statemgr's operator in ``stateOperators``."""
        reports = self.recentBatches
        return [with_state(progress, self._driver.plan, reports) for progress in super().recentProgress]

    @property
    def lastProgress(self) -> StreamingQueryProgress | None:  # noqa: N802
        """Like Spark's, with statemgr's operator in ``stateOperators``."""
        progress = super().lastProgress
        return None if progress is None else with_state(progress, self._driver.plan, self.recentBatches)

    def explain(self, extended: bool = False) -> None:
        """Print what the query does with its input, and Spark's plan of the input."""
        sys.stdout.write(explained(self._driver.plan))
        super().explain(extended)

    def addListener(self, listener: StatefulQueryListener) -> None:  # noqa: N802
        """Pass the report of every later batch of this query to ``listener``."""
        self._driver.observers.add(listener)

    def removeListener(self, listener: StatefulQueryListener) -> None:  # noqa: N802
        """Undo :meth:`addListener`."""
        self._driver.observers.remove(listener)

    def awaitTermination(self, timeout: int | None = None) -> bool | None:  # noqa: N802
        """Like Spark's. Raises: statemgr's typed error if one ended the query, else Spark's exception."""
        try:
            with self._typed_errors():
                return super().awaitTermination(timeout)
        finally:
            if not self.isActive:
                self._closed("it has ended" if super().exception() is None else "a batch failed")

    def processAllAvailable(self) -> None:  # noqa: N802
        """Like Spark's, with the errors of :meth:`awaitTermination`."""
        with self._typed_errors():
            if not self._driver.has_heartbeat:
                super().processAllAvailable()
                return
            self._driver.idle.wait(lambda: self.isActive)  # a heartbeat is always available
            error = super().exception()
            if error is not None:
                raise error

    def exception(self) -> StatemgrError | StreamingQueryException | None:  # type: ignore[override]
        """The error that ended the query: statemgr's typed error if there is one, else Spark's exception."""
        error = super().exception()
        return None if error is None else self._typed(error)

    def stop(self) -> None:
        """Stop the query and release the job."""
        story.stopping(self._manager.config.job_name, "stop() was called")
        self._driver.stopping = True
        super().stop()
        self._closed("stop() was called")

    def _closed(self, why: str) -> None:
        if not self._told:
            self._told = True
            self._driver.observers.close()
            story.stopped(self._manager.config.job_name, why)
        self._manager.close()
        if self._own is not None:
            atexit.unregister(self._own.close)
            self._own.close()

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        from pyspark.errors import StreamingQueryException

        try:
            yield
        except StreamingQueryException as error:
            raise self._typed(error) from error

    def _typed(self, error: StreamingQueryException) -> StatemgrError | StreamingQueryException:
        text = str(error)
        if _UNLISTED_PARTITIONS in text:
            return other_partitions(text)
        if _OTHER_SOURCES in text:
            return BatchMismatch(
                "the checkpoint location was made by a query with another number of sources",
                hint="take a new location, or undo the change: of the input, or of "
                "spark.sql.streaming.noDataMicroBatches.enabled, which adds a source",
                job=self._manager.config.job_name,
            )
        return self._driver.failure or find(text) or self._driver.lost_location() or error
