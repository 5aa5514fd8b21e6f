"""The last steps that a rescale and the way back share: own the whole job, and publish the first checkpoints of a
layout in one transaction, which also retires the one in force."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial

from statemgr.backends.services import Services
from statemgr.errors import FencedError, OutcomeUnknownError
from statemgr.flows.clean_up import CleanUp
from statemgr.flows.open_job import fence_ids, take_over
from statemgr.flows.ownership import Published, settle_now
from statemgr.flows.publish import publish
from statemgr.ids import task_name
from statemgr.kafka.publisher import TransactionalPublisher, job_transactional_id, task_transactional_id
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, Layout, MicroBatch
from statemgr.model.commit import PreparedCommit
from statemgr.model.layouts import RetiredLayout
from statemgr.model.offers import Offer, OfferKey
from statemgr.model.permissions import Permit
from statemgr.ports import CheckpointLog


@contextmanager
def fenced(new: Services, tasks_before: int) -> Iterator[tuple[TransactionalPublisher, Callable[[], None]]]:
    """Own the whole job: fence every task of both layouts. Yields: the publisher, and a function that fences the tasks
    again."""
    config = new.config
    ids = [task_transactional_id(config, task_name(number)) for number in range(max(tasks_before, config.tasks))]
    with closing(take_over(new, job_transactional_id(config), config.job_name)) as publisher:
        fence_ids(new, ids)
        yield publisher, partial(fence_ids, new, ids)


def publish_layout(
    services: Services,
    publisher: TransactionalPublisher,
    log: CheckpointLog,
    published: Published,
    commits: Sequence[PreparedCommit],
    batch: MicroBatch | None,
) -> None:
    """Publish the first checkpoints of a layout, and remove the TTLs of their blobs.

    Raises: FencedError, RetryableError: surely not published; OutcomeUnknownError: the topic says what is in force.
    """
    try:
        publish(services, publisher, log, published, commits, batch=batch, evict=False)
    except OutcomeUnknownError:
        settle_now(services, publisher, log, published, "the new layout")
    added = [blob for commit in commits for blob in commit.added_blobs]
    if added:
        # what fails is tried again by the next opening
        services.transfer().remove_ttl_all(added)


def retiring(services: Services, layout: Layout) -> tuple[bytes, bytes]:
    """The record, key and value, that retires a layout now."""
    config, now_ms = services.config, services.clock.time_ns() // 1_000_000
    made = RetiredLayout(config.job_name, config.job_id, layout, now_ms)
    return made.key, made.value


def newest_sequence(records: Mapping[str, CheckpointRecord]) -> int:
    """The highest sequence number of the current checkpoints."""
    return max(record.current.sequence for record in records.values())


def current_checkpoints(published: Published) -> Mapping[str, Checkpoint]:
    """Task → its checkpoint, of the tasks that have one."""
    return {task: record.current for task, record in published.records.items() if record is not None}


def keep_blobs(services: Services, log: CheckpointLog, records: Mapping[str, CheckpointRecord]) -> None:
    """Remove the TTLs that a dead owner has left on what a layout's last checkpoints added: no opening will."""
    for task, record in records.items():
        clean_up = CleanUp(services, task, log)
        clean_up.at_open(record, delete=False)
        clean_up.retry_ttls()


class OfLayout:
    """Implements ``ports.CheckpointLog`` for the owner that publishes a new layout.

    Args:
        layout: the layout to come.
        unpublished: the records that its tasks continue, until it is published.
        current: the records of the layout in force. If they change, there is another owner.
    """

    def __init__(
        self,
        log: CheckpointLog,
        layout: Layout,
        unpublished: Mapping[str, CheckpointRecord],
        current: Mapping[str, CheckpointRecord],
    ) -> None:
        self._log, self._layout, self._unpublished, self._current = log, layout, unpublished, current

    def read(
        self, tasks: Collection[str] | None = None, *, only_settled: bool = False, generation: int | None = None
    ) -> Mapping[str, CheckpointRecord]:
        """Also raises: FencedError if the layout in force has other checkpoints, or another layout is."""
        found = self._log.read(None, only_settled=only_settled, generation=generation)
        if {record.layout.generation for record in found.values()} != {self._layout.generation}:
            ids = {task: str(record.current.checkpoint_id) for task, record in found.items()}
            if ids != {task: str(record.current.checkpoint_id) for task, record in self._current.items()}:
                raise FencedError("another owner has published a checkpoint in the meantime", hint="run it again")
            found = self._unpublished
        return {task: record for task, record in found.items() if tasks is None or task in tasks}

    def retired(self) -> Sequence[RetiredLayout]:
        return self._log.retired()

    def record_keys(self, generation: int) -> Sequence[bytes]:
        return self._log.record_keys(generation)

    def permits(self) -> Sequence[Permit]:
        return self._log.permits()

    def offers(self) -> Mapping[OfferKey, Offer]:
        return {}

    def job_records(self) -> Collection[int]:
        return ()

    def begin_check(self) -> Callable[[int], None]:
        return self._log.begin_check()

    def ends_at(self, end: int) -> bool:
        return self._log.ends_at(end)

    def was_truncated(self) -> bool:
        return self._log.was_truncated()
