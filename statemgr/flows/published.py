"""What one owner has published: the newest records of its tasks, and what its next publish adds. No I/O here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from statemgr.errors import InvalidError
from statemgr.flows.committing.checkpoint_records import sequences
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, Layout, MicroBatch
from statemgr.model.jobs.offers import OfferKey
from statemgr.model.jobs.permissions import Permit


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
        sequence: the highest sequence number that other layouts of the job have used.
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
        self.pending, self.permits, self.offers, self.kept, self.along, self.end = {}, (), (), {}, (), end
        self.records.update(records)
        if len(self.records) > 1:
            of_publish = {record.current.sequence for record in records.values()}
            self.job_records = (self.job_records | of_publish) & sequences(self.records)

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
