"""What a rescale and the way back share when they publish the first checkpoints of a layout, in one transaction that
also retires the current one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from statemgr.errors import FencedError, RetryableError
from statemgr.flows.committing.clean_up import taken_over
from statemgr.logs import counted
from statemgr.model.checkpoint import CheckpointRecord, Layout
from statemgr.model.jobs.adopted_job import AdoptedJob
from statemgr.model.jobs.layouts import RetiredLayout
from statemgr.model.jobs.offers import Offer, OfferKey
from statemgr.model.jobs.permissions import Permit
from statemgr.ports import CheckpointLog
from statemgr.services import Services


def retiring(services: Services, layout: Layout) -> tuple[bytes, bytes]:
    """The record, key and value, that retires a layout now."""
    config, now_ms = services.config, services.clock.time_ns() // 1_000_000
    made = RetiredLayout(config.job_name, config.job_id, layout, now_ms)
    return made.key, made.value


def newest_sequence(log: CheckpointLog, records: Mapping[str, CheckpointRecord]) -> int:
    """The highest sequence number of the current layout, as of the last read. ``records``: its checkpoints."""
    return max((*log.job_records(), *(record.current.sequence for record in records.values())))


def keep_blobs(services: Services, left: Mapping[str, CheckpointRecord]) -> None:
    """Remove the TTLs that are left on blobs of the current layout, before another one replaces it: its tasks are not
    opened again, but the job may go back to it. Raises: RetryableError if one cannot be removed.
    """
    for task, record in left.items():
        if outstanding := taken_over(services, record).outstanding:
            raise RetryableError(
                f"nothing was published: the TTL of {counted(len(outstanding), 'blob')} could not be removed",
                hint="run it again; if it was refused, allow this user to delete object tags (s3:DeleteObjectTagging)",
                job=services.config.job_name,
                task=task,
                blob=outstanding[0].blob_id,
            )


class OfLayout:
    """Implements ``ports.CheckpointLog`` for the owner that publishes a new layout.

    Args:
        layout: the layout to come.
        unpublished: the records that its tasks continue, until it is published.
        current: the records of the current layout. If they change, there is another owner.
        brought_back: the records of a replaced layout that becomes current again, as they were read.
    """

    def __init__(
        self,
        log: CheckpointLog,
        layout: Layout,
        unpublished: Mapping[str, CheckpointRecord],
        current: Mapping[str, CheckpointRecord],
        brought_back: Mapping[str, CheckpointRecord] | None = None,
    ) -> None:
        self._log, self._layout, self._unpublished, self._current = log, layout, unpublished, current
        self._brought_back = brought_back or {}

    def read(
        self, tasks: Collection[str] | None = None, *, only_settled: bool = False, generation: int | None = None
    ) -> Mapping[str, CheckpointRecord]:
        """Also raises: FencedError if the current layout has other checkpoints, or another layout is."""
        found = self._log.read(None, only_settled=only_settled, generation=generation)
        if {record.layout.generation for record in found.values()} != {self._layout.generation}:
            ids = {task: str(record.current.checkpoint_id) for task, record in found.items()}
            if ids != {task: str(record.current.checkpoint_id) for task, record in self._current.items()}:
                raise FencedError("another owner has published a checkpoint in the meantime", hint="run it again")
            found = self._unpublished
        return {task: record for task, record in found.items() if tasks is None or task in tasks}

    def current(self) -> Mapping[str, CheckpointRecord]:
        return self.read()

    def retired(self) -> Sequence[RetiredLayout]:
        return self._log.retired()

    def record_keys(self, generation: int) -> Sequence[bytes]:
        return self._log.record_keys(generation)

    def permits(self) -> Sequence[Permit]:
        return self._log.permits()

    def offers(self) -> Mapping[OfferKey, Offer]:
        return {}

    def adopted(self) -> AdoptedJob | None:
        return self._log.adopted()

    def job_records(self) -> Collection[int]:
        return ()

    def begin_check(self) -> Callable[[int], None]:
        """The check in the transaction also compares the layout that is brought back with the topic. Who sees it
        collected, and deletes its blobs, has read the topic before the transaction's first record, or waits for its
        end. Raises: RetryableError if it is not as it was."""
        self._compare()  # most records are read here, and the transaction does not wait for them
        check_topic = self._log.begin_check()

        def check(end: int) -> None:
            check_topic(end)
            self._compare()

        return check

    def _compare(self) -> None:
        for generation in {record.layout.generation for record in self._brought_back.values()}:
            if self._log.read(only_settled=True, generation=generation) != self._brought_back:
                raise RetryableError(
                    "nothing was published: garbage collection has collected the layout to go back to, or somebody has "
                    "changed which checkpoints it keeps",
                    hint="run it again: it goes back if the layout is still there",
                )

    def ends_at(self, end: int) -> bool:
        return self._log.ends_at(end)

    def was_truncated(self) -> bool:
        return self._log.was_truncated()
