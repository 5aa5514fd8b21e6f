"""Output records of a task that wait for the commit that publishes them."""

from __future__ import annotations

import threading

from statemgr.errors import RetryableError
from statemgr.model.commit import ProducedRecord
from statemgr.model.record_size import PRODUCER_LIMIT, size_of_record, too_large

#: Bytes of output that may wait for a commit.
BUDGET = 256 * 1024 * 1024


class Output:
    """Records in order. The task's thread adds them; the commit's thread removes them.

    Args:
        most_bytes: what the producer takes as key, value and headers of one record.
    """

    def __init__(self, task: str, most_bytes: int) -> None:
        self._task = task
        self._most_bytes = most_bytes
        self._records: list[ProducedRecord] = []
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, record: ProducedRecord) -> None:
        """Add a record. Raises: InvalidError if it is too large; RetryableError if too many bytes wait for a commit."""
        size = _size(record)
        if size > self._most_bytes:
            raise too_large(record.key, size, self._most_bytes, PRODUCER_LIMIT, task=self._task, topic=record.topic)
        with self._lock:
            if self._bytes + size > BUDGET:
                raise RetryableError(
                    f"more than {BUDGET} bytes of output are waiting for a commit",
                    hint="commit more often",
                    task=self._task,
                )
            self._records.append(record)
            self._bytes += size

    def waiting(self) -> tuple[ProducedRecord, ...]:
        """The records that no commit has published yet."""
        return tuple(self._records)

    def drop(self) -> int:
        """Remove all records, while no commit is in progress. Returns: their number."""
        with self._lock:
            dropped, self._records, self._bytes = len(self._records), [], 0
        return dropped

    def published(self, count: int) -> None:
        """Remove the first ``count`` records, which were published."""
        with self._lock:
            self._bytes -= sum(map(_size, self._records[:count]))
            del self._records[:count]


def _size(record: ProducedRecord) -> int:
    return size_of_record(record.key, record.value)
