"""What one owner has published, what of it is damaged, and the records that its next publish writes. No I/O here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from statemgr.config import JobConfig
from statemgr.errors import InvalidError
from statemgr.ids import CheckpointId
from statemgr.model import codecs
from statemgr.model.checkpoint import Checkpoint, CheckpointKey, CheckpointRecord, Layout, MicroBatch
from statemgr.model.checkpoint_records import JobCheckpoint, common_inputs, publish_of, task_alone, task_part
from statemgr.model.jobs.offers import OfferKey
from statemgr.model.jobs.permissions import Permit

if TYPE_CHECKING:
    from statemgr.flows.committing.commit import Refill
    from statemgr.flows.opening.restore import StoreRestore

log = logging.getLogger("statemgr.damage")
Send = Callable[[bytes, bytes | None], None]
Records = Mapping[str, CheckpointRecord]


@dataclass
class Published:
    """The records on the topic of the tasks that one owner has. Only a publish, and settling one, change it.

    Attributes:
        records: task → its newest record.
        serdes: store → labels of its serdes, if they are not those of the configuration; None if not known yet.
        pending: the records of a publish that was sent but not answered. It must be settled next.
        job_records: the sequence numbers of the job records on the topic, for an owner of several tasks.
        permits: one-shot permissions of the opening, which the first publish uses up.
        offers: offers of first snapshots that the next publish deletes.
        kept: task → the checkpoints that it keeps from now on, if they are not those of its newest checkpoint.
        sequence: the highest sequence number that other layouts of the job, or a lost state of it, may have used.
        used: those of ``permits`` that the newest publish deletes.
        along: keys and values of further records that the first publish sends; None deletes a record.
        end: the offset after the last record of the newest publish on the topic, if it was acknowledged.
    """

    records: dict[str, CheckpointRecord | None]
    epoch: int
    layout: Layout
    serdes: Mapping[str, tuple[str, str] | None] = field(default_factory=dict)
    pending: dict[str, CheckpointRecord] = field(default_factory=dict)
    job_records: set[int] = field(default_factory=set)
    permits: tuple[Permit, ...] = ()
    used: tuple[Permit, ...] = ()
    offers: tuple[OfferKey, ...] = ()
    kept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sequence: int = 0
    along: tuple[tuple[bytes, bytes | None], ...] = ()
    end: int | None = None

    @property
    def newest_sequence(self) -> int:
        """The highest published sequence number of these tasks; 0 if there is none."""
        return max((self.sequence, *self.job_records, *(r.current.sequence for r in self.records.values() if r)))

    @property
    def checkpoints(self) -> dict[str, Checkpoint]:
        """Task → its current checkpoint, of the tasks that have one."""
        return {task: record.current for task, record in self.records.items() if record is not None}

    def acknowledge(self, records: Mapping[str, CheckpointRecord], end: int | None = None) -> None:
        """Make these records the published ones."""
        self.pending, self.offers, self.kept, self.along, self.end = {}, (), {}, (), end
        self.permits = tuple(permit for permit in self.permits if permit not in self.used)
        self.records.update(records)
        if len(self.records) > 1:
            self.job_records |= {record.current.sequence for record in records.values()}
        self.job_records &= sequences(self.records)

    def checkpoint(self, task: str) -> Checkpoint | None:
        record = self.records[task]
        return record.current if record else None

    def kept_by(self, task: str) -> tuple[str, ...]:
        """The IDs of the checkpoints that the task's next checkpoint keeps."""
        record = self.records[task]
        if task in self.kept or record is None:
            return self.kept.get(task, ())
        return record.kept

    def older(self, task: str) -> Sequence[Checkpoint]:
        """The retained checkpoints except the current one, newest first."""
        record = self.records[task]
        return record.checkpoints[1:] if record else ()


def common_serdes(checkpoints: Iterable[Checkpoint]) -> dict[str, tuple[str, str]]:
    """Store → the serdes of its keys and values in these checkpoints of several tasks.

    Raises: InvalidError if they differ.
    """
    found: dict[str, tuple[str, str]] = {}
    for checkpoint in checkpoints:
        for store, serdes in checkpoint.serdes.items():
            if found.setdefault(store, serdes) != serdes:
                raise InvalidError(
                    "the tasks' checkpoints were written with different serdes",
                    hint="commit with every task, or choose checkpoints from after the change",
                    store=store,
                )
    return found


def common_batch(checkpoints: Iterable[Checkpoint]) -> MicroBatch | None:
    """The micro-batch of these checkpoints of several tasks; None if they have none, or different ones."""
    batches = {checkpoint.batch for checkpoint in checkpoints}
    return batches.pop() if len(batches) == 1 else None


class Damage:
    """The known damage of one task's current checkpoint. Safe to use from many threads."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._pairs: dict[tuple[str, str], None] = {}
        self._suspicions = self._answered = 0
        self._changed: Callable[[], None] = lambda: None
        self._is_busy: Callable[[], bool] = lambda: False

    def watch(self, changed: Callable[[], None], is_busy: Callable[[], bool]) -> None:
        """Call ``changed``, from any thread, when there is something to check or to repair; now if there already is.

        ``is_busy``: whether an earlier call is still being worked on, so that :meth:`remind` need not call again.
        """
        self._changed, self._is_busy = changed, is_busy
        if self.pairs or self.suspicion is not None:
            changed()

    @property
    def pairs(self) -> Refill:
        """(factory, store) pairs whose backup must be made again."""
        with self._lock:
            return frozenset(self._pairs)

    @property
    def suspicion(self) -> int | None:
        """The number of the suspicion to pass to :meth:`checked`; None if nothing is suspected."""
        with self._lock:
            return self._suspicions if self._suspicions > self._answered else None

    def suspect(self) -> None:
        """Note that something may be wrong, so that everything is checked."""
        with self._lock:
            self._suspicions += 1
        self._changed()

    def remind(self) -> None:
        """Ask for a check or a repair once more: it may have failed so often that nobody repeats it."""
        if (self.pairs or self.suspicion is not None) and not self._is_busy():
            self._changed()

    def found(self, factory: str, store: str, why: object) -> None:
        """Note that a store's backup of the current checkpoint is damaged, and log why."""
        with self._lock:
            if (factory, store) in self._pairs:
                return
            self._pairs[factory, store] = None
        what = "%s: the backup of %s in %s is damaged; the next commit makes it again: %s"
        log.error(what, self._task, store, factory, why)
        self._changed()

    def checked(self, suspicion: int, found: Mapping[tuple[str, str], str]) -> None:
        """Note that everything was checked since a suspicion."""
        with self._lock:
            self._answered = max(self._answered, suspicion)
        for (factory, store), why in found.items():
            self.found(factory, store, why)

    def note(self, restored: Iterable[StoreRestore]) -> None:
        """Note the damage that a restore met."""
        for one in restored:
            for factory in one.damaged:
                self.found(factory, one.store, one.reasons.get(factory, "it could not be restored"))
            if one.unreachable:
                self.suspect()

    def repaired(self, pairs: Collection[tuple[str, str]]) -> None:
        """Note that a checkpoint with new backups of these pairs was published."""
        with self._lock:
            for pair in pairs:
                self._pairs.pop(pair, None)


# --- the records of a publish ----------------------------------------------------------------------------------------


def send_records(
    config: JobConfig,
    send: Send,
    layout: Layout,
    before: Mapping[str, CheckpointRecord | None],
    after: Records,
    job_records: Collection[int],
) -> None:
    """Send all records of a publish of the tasks in ``after``: new records, and deletes of those that retention drops.

    A reader may see only the first records of a publish. So they have this order:

    1. a version 1 checkpoint that older software made current, under its own key, so that it stays retained
    2. the older checkpoints that come along from another layout, oldest first, in the form of 3 and 4
    3. the job record, if several tasks are published together; task records refer to it
    4. one task record per task
    5. version 1 records, if older software reads them too
    6. deletes: task records first, then job records that nothing refers to any more

    Args:
        send: takes the key and the value of a record, or None to delete it.
        before: the tasks' records on the topic.
        job_records: the sequence numbers of the job records on the topic that this publisher may delete.
    """
    for task, record in after.items():  # 1
        adopted = _adopted(before[task])
        if adopted is not None and adopted.checkpoint_id in {c.checkpoint_id for c in record.checkpoints}:
            send(*codecs.encode_task(record.key(adopted), task_alone(adopted, layout)))
    for older in _taken_along(before, after):  # 2
        _send_new(config, send, layout, older)
    _send_new(config, send, layout, after)  # 3, 4
    if 1 in config.write_versions:  # 5
        for record in after.values():
            send(codecs.encode_key(record.key_v1()), codecs.encode_record_v1(record))
    for task, record in after.items():  # 6
        for checkpoint in _dropped(before[task], record):
            send(codecs.encode_key(record.key(checkpoint)), None)
    for sequence in sorted(set(job_records) - sequences(after)):
        send(codecs.encode_key(_job_key(config, layout, sequence)), None)


def sequences(records: Mapping[str, CheckpointRecord | None]) -> set[int]:
    """The sequence numbers of all retained checkpoints."""
    return {checkpoint.sequence for record in records.values() if record for checkpoint in record.checkpoints}


def _send_new(config: JobConfig, send: Send, layout: Layout, after: Records) -> None:
    if len(after) == 1:
        ((_, record),) = after.items()
        send(*codecs.encode_task(record.key(record.current), task_alone(record.current, layout)))
        return
    current = {task: record.current for task, record in after.items()}
    publish = publish_of(next(iter(current.values())), common_inputs(current))
    send(*codecs.encode_job(_job_key(config, layout, publish.sequence), JobCheckpoint(layout, publish)))
    for record in after.values():
        send(*codecs.encode_task(record.key(record.current), task_part(record.current, publish)))


def _job_key(config: JobConfig, layout: Layout, sequence: int) -> CheckpointKey:
    return CheckpointKey(config.job_name, config.job_id, layout.generation, "", 2, sequence)


def _taken_along(before: Mapping[str, CheckpointRecord | None], after: Records) -> list[Records]:
    """The older checkpoints that have no record in this layout yet: one mapping for each earlier publish, oldest
    first."""
    publishes: dict[tuple[int, CheckpointId], dict[str, CheckpointRecord]] = {}
    for task, record in after.items():
        earlier = before[task]
        if earlier is not None and earlier.layout.generation != record.layout.generation:
            for one in record.checkpoints[1:]:
                of_publish = publishes.setdefault((one.sequence, one.checkpoint_id), {})
                of_publish[task] = replace(record, checkpoints=(one,))
    return [publishes[at] for at in sorted(publishes, key=lambda at: (at[0], str(at[1])))]


def _adopted(before: CheckpointRecord | None) -> Checkpoint | None:
    """The current checkpoint if it has no version 2 record yet, else None."""
    return before.current if before is not None and before.from_version_one else None


def _dropped(before: CheckpointRecord | None, after: CheckpointRecord) -> list[Checkpoint]:
    """The checkpoints of the same layout that have a record and are no longer retained."""
    if before is None or before.layout.generation != after.layout.generation:
        return []
    kept = {checkpoint.checkpoint_id for checkpoint in after.checkpoints}
    adopted = _adopted(before)
    return [c for c in before.checkpoints if c.checkpoint_id not in kept and c is not adopted]
