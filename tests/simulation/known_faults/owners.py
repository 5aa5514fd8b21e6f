"""Known faults of owners: fencing, reading the topic, outcomes of commits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import statemgr.consumer.loop as looping
import statemgr.flows.committing.publish as publishing
import statemgr.flows.owner as owning
import statemgr.kafka.checkpoint_topic as checkpoint_topic
import statemgr.kafka.reader as reading
import statemgr.local.change_buffer as change_buffer
import statemgr.operations.adopt.adopt as adopting
from statemgr.consumer.assigned_tasks import AssignedTasks
from statemgr.errors import (
    MissingError,
    RetryableError,
    StatemgrError,
)
from statemgr.ids import IdSource
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.kafka.input_topics import InputTopics
from statemgr.kafka.transactions.producer import TransactionalProducer
from tests.simulation.known_faults.registry import Patches, imported, known, patch

# --- fencing ---------------------------------------------------------------------------------------------------------


@known
def a_loop_reads_more_partitions_than_tasks() -> Patches:
    """A loop runs with the old number of tasks although somebody has added partitions to its topic."""
    return [patch(InputTopics, "check", lambda *args: None), patch(looping, "topic_problem", lambda *args: None)]


@known
def fence_after_the_read() -> Patches:
    """An opening reads the topic and then fences, so that it misses what the older owner publishes in between."""
    take = owning.Owner.take.__func__  # type: ignore[attr-defined]

    class Stale:
        def __init__(self, log: Any, found: Any) -> None:
            self._log, self._found = log, [found]

        def read(self, tasks: Any = None, **more: Any) -> Any:
            if not self._found:
                return self._log.read(tasks, **more)
            return {task: record for task, record in self._found.pop().items() if tasks is None or task in tasks}

        def __getattr__(self, name: str) -> Any:
            return getattr(self._log, name)

    def early(cls: Any, services: Any, log: Any, *args: Any, **more: Any) -> Any:
        with suppress(MissingError):
            log = Stale(log, log.read())
        services.clock.sleep(1.0)
        return take(cls, services, log, *args, **more)

    return [patch(owning.Owner, "take", classmethod(early))]


@known
def no_fence() -> Patches:
    """Every owner has a transactional ID of its own, so nobody is fenced."""
    real, numbers = imported(owning, "task_transactional_id"), itertools.count()
    return [patch(owning, "task_transactional_id", lambda config, task: f"{real(config, task)}-{next(numbers)}")]


@known
def only_own_kind_is_fenced() -> Patches:
    """A task's owner does not fence the owner of the whole job, and the other way round."""
    return [patch(owning.Owner, "fence_others", lambda self: None)]


@known
def fence_of_a_task_that_was_given_back() -> Patches:
    """A member gives a task back while it still fences it, and so ends the next owner."""
    real = AssignedTasks.close

    def close(self: Any, *args: Any, **more: Any) -> None:
        fencer = SimpleNamespace(submit=lambda work: SimpleNamespace(result=work))
        with mock.patch.object(self, "_fencer", fencer):
            real(self, *args, **more)

    return [patch(AssignedTasks, "close", close)]


@known
def zombie_takes_its_id_again() -> Patches:
    """An owner whose ID was forgotten, or whose transaction timed out, takes the ID again without reading the topic."""

    def regain(self: Any, expected: Any) -> None:
        self.publisher.regain()

    return [patch(owning.Owner, "_regain", regain), patch(owning.Owner, "confirm", lambda self: None)]


@known
def one_epoch_for_two_owners() -> Patches:
    """The epoch is the newest published one plus one, so two owners that read the same topic have the same."""
    return [patch(IdSource, "epoch", lambda self, newest: newest + 1)]


@known
def epoch_is_not_checked() -> Patches:
    """A driver publishes a commit that was prepared for an older owner."""
    real = publishing._Publish._check_base

    def check(self: Any, commit: Any) -> None:
        real(self, replace(commit, epoch=self.published.epoch))

    return [patch(publishing._Publish, "_check_base", check)]


@known
def adoption_is_repeated() -> Patches:
    """An adoption does not look whether an earlier run has adopted the job, and begins again."""
    return [patch(adopting, "repeated", lambda *args, **more: {})]


# --- reading the topic -----------------------------------------------------------------------------------------------


@known
def read_to_the_last_stable_offset() -> Patches:
    """An opening reads only up to the first open transaction, which hides newer records of its own task."""
    real = CheckpointTopic._bounds
    return [patch(CheckpointTopic, "_bounds", lambda self, only_settled=False: real(self, True))]


@known
def lost_records_count_after_an_election() -> Patches:
    """A process that has read the topic reads on after an unclean election, and keeps the records that are lost."""

    def continues(self: Any, bounds: Any, position: int) -> bool:
        return bool(self.bounds.topic_id == bounds.topic_id and position <= bounds.end)

    return [patch(imported(checkpoint_topic, "_Seen"), "continues", continues)]


@known
def uncommitted_records_are_read() -> Patches:
    """Readers take records of open and aborted transactions too, which is Kafka's default isolation.level."""
    real = imported(reading, "consumer")

    def consumer(*args: Any, **more: Any) -> Any:
        return real(*args, **{**more, "isolation_level": "read_uncommitted"})

    return [patch(reading, "consumer", consumer)]


@known
def waits_for_a_last_record() -> Patches:
    """A read waits for a record at the last offset, where a transaction's marker is (Quix Streams)."""

    def after(self: Any, event: Any) -> int:
        return 0

    return [patch(reading._Reading, "_after", after)]


@known
def newest_record_loses() -> Patches:
    """Of several records the one with the highest sequence number counts, even if an older owner wrote it later."""
    from statemgr.kafka.checkpoint_assembly import Track

    real = Track.newest_first
    return [patch(Track, "newest_first", lambda self: list(reversed(real(self))))]


# --- outcomes --------------------------------------------------------------------------------------------------------


def _settled(was_published: bool) -> Callable[[Any], bool]:
    def settle(self: Any) -> bool:
        pending, self.published.pending = self.published.pending, {}
        with suppress(StatemgrError):
            self.publisher.settle()
        if self.publisher.regained:
            self.publisher.regain()
        self.publisher.confirmed()
        if was_published:
            self.published.acknowledge(pending)
        return was_published

    return settle


@known
def unknown_is_failed() -> Patches:
    """A commit that was not answered counts as failed, and is not looked for on the topic."""
    return [patch(owning.Owner, "settle", _settled(False))]


@known
def unknown_is_success() -> Patches:
    """A commit that was not answered counts as published."""
    return [patch(owning.Owner, "settle", _settled(True))]


@known
def failed_commit_drops_its_changes() -> Patches:
    """Changes count as stored when they are taken for a commit, so a failed commit loses them."""
    real = change_buffer.ChangeBuffer.freeze

    def freeze(self: Any) -> Any:
        frozen = real(self)
        kept = tuple(frozen._generations)
        self._sealed = []
        return change_buffer.FrozenChanges(frozen.session, frozen.freeze, frozen.end, kept)

    return [patch(change_buffer.ChangeBuffer, "freeze", freeze)]


@known
def changes_during_a_commit_are_dropped() -> Patches:
    """An acknowledgement drops the changes that were made while the commit was in progress."""

    def acknowledge(self: Any, frozen: Any) -> None:
        self._sealed = []
        self._growing = change_buffer._Generation(self._growing.end)

    return [patch(change_buffer.ChangeBuffer, "acknowledge", acknowledge)]


@known
def success_before_the_commit() -> Patches:
    """The commit request of the transaction is not sent, and the publish counts as a success."""
    return [patch(TransactionalProducer, "commit", lambda self, deadline: None)]


@known
def upload_that_failed_counts() -> Patches:
    """A blob whose upload was not answered counts as stored."""
    from statemgr.blobs.retrying import RetryingBlobStore

    def put(self: Any, *args: Any, **more: Any) -> None:
        with suppress(RetryableError):
            self.inner.put(*args, **more)

    return [patch(RetryingBlobStore, "put", put)]
