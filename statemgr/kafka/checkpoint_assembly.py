"""Keeps the records of the checkpoint topic by task, and makes checkpoints of them. No I/O.

Messages stay undecoded until somebody asks for them, because most are deleted before that.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Message

from statemgr.errors import CorruptRecord, MissingState
from statemgr.kafka.reader import offset_of
from statemgr.model import codecs
from statemgr.model.checkpoint import Checkpoint, CheckpointKey, CheckpointRecord, Layout, without_outstanding
from statemgr.model.checkpoint_records import JobCheckpoint, TaskCheckpoint, checkpoint_of

PARTITION = 0


class TrackId(NamedTuple):
    """Names a track. ``task`` is empty for job records. Version 1 records have tracks of their own."""

    generation: int
    task: str
    version: int


@dataclass(slots=True)
class Track:
    """The records of one task (or the job records) in one layout that are not deleted.

    ``headers``: what their values may begin with. ``highest_deleted``: the highest sequence number that was deleted;
    ``deleted_at``: the offset of that delete. ``made``: what :class:`Assembly` made of the records, until they change;
    ``current``: the same of the newest one alone; ``jobs``: the sequence numbers of the job records that its
    checkpoints refer to.
    """

    id: TrackId
    headers: Collection[bytes]
    messages: dict[bytes, Message] = field(default_factory=dict)
    highest_deleted: int = -1
    deleted_at: int = -1
    decoded: dict[bytes, tuple[int, JobCheckpoint | TaskCheckpoint]] = field(default_factory=dict)
    made: CheckpointRecord | None = None
    current: CheckpointRecord | None = None
    jobs: frozenset[int] = frozenset()

    def deleted(self, key: bytes, offset: int) -> None:
        """Remove a record; later ones stay."""
        self.made = self.current = None
        sequence = codecs.sequence_of(key)
        if sequence > self.highest_deleted:
            self.highest_deleted, self.deleted_at = sequence, offset
        self.messages.pop(key, None)
        self.decoded.pop(key, None)

    def sequences(self) -> set[int]:
        """The sequence numbers of the records that are there."""
        return {codecs.sequence_of(key) for key in self.messages}

    def written(self, key: bytes, message: Message) -> None:
        """Add a record at the end, also when it replaces an earlier one with the same key."""
        self.made = self.current = None
        self.messages.pop(key, None)
        self.messages[key] = message

    def newest_first(self) -> list[tuple[bytes, Message]]:
        """Keys and messages, newest in the log first."""
        return list(reversed(self.messages.items()))


class _Combined(NamedTuple):
    """A checkpoint, its layout, and the sequence number of the job record that it refers to, if it refers to one."""

    layout: Layout
    checkpoint: Checkpoint
    job: int | None


class Assembly:
    """Makes checkpoint records of tracks, and caches them. For one job and one topic."""

    def __init__(self, job_name: str, job_id: str, topic: str) -> None:
        self._job_name = job_name
        self._job_id = job_id
        self._topic = topic

    def record(self, track: Track, jobs: Track | None, there: Set[int]) -> CheckpointRecord | None:
        """A task's version 2 checkpoints, or None if it never had any.

        Args:
            there: the sequence numbers of the job records that exist.

        Raises: CorruptRecord; MissingState if a needed record was deleted.
        """
        if not self._has_any(track):
            return None
        if track.made is None or not track.jobs <= there:
            made = [self._needed(track, key, message, jobs) for key, message in track.newest_first()]
            track.jobs = frozenset(found.job for found in made if found.job is not None)
            newest, *older = (found.checkpoint for found in made)
            assert newest.offset is not None
            track.made = self._of(track, made[0].layout, (newest, *without_outstanding(older)), newest.offset)
        return track.made

    def current(self, track: Track, jobs: Track | None) -> CheckpointRecord | None:
        """:meth:`record` with the newest checkpoint only: the others are not decoded."""
        if track.made is None and track.current is None and self._has_any(track):
            key, message = next(reversed(track.messages.items()))
            found = self._needed(track, key, message, jobs)
            track.current = self._of(track, found.layout, (found.checkpoint,), offset_of(message))
        return track.made or track.current

    def version_one(self, track: Track | None) -> CheckpointRecord | None:
        """A task's version 1 record. Raises: CorruptRecord."""
        if track is None or not track.messages:
            return None
        if track.made is None:
            ((_, message),) = track.messages.items()
            value, key = message.value(), self._key(track, None)
            assert value is not None
            place = codecs.Place(self._topic, PARTITION, offset_of(message))
            track.made = codecs.decode_record_v1(key, value, place)
        return track.made

    def single(self, track: Track, key: bytes, message: Message, jobs: Track | None) -> CheckpointRecord | None:
        """The checkpoint of one record, or None if compaction has already removed its job record."""
        found = self._combined(track, key, message, jobs)
        return self._of(track, found.layout, (found.checkpoint,), offset_of(message)) if found is not None else None

    def _has_any(self, track: Track) -> bool:
        """Whether there are checkpoints. Raises: CorruptRecord if the newest one was deleted."""
        if track.messages or track.highest_deleted >= 0:
            self._refuse_deleted(track)
        return bool(track.messages)

    def _needed(self, track: Track, key: bytes, message: Message, jobs: Track | None) -> _Combined:
        """Raises: MissingState if the job record is missing."""
        found = self._combined(track, key, message, jobs)
        if found is None:
            raise self._lost_job(track, codecs.sequence_of(key), offset_of(message))
        return found

    def _combined(self, track: Track, key: bytes, message: Message, jobs: Track | None) -> _Combined | None:
        """The checkpoint of a task's record and its job record; None if it needs a job record that is missing."""
        task = self._decoded(track, key, message)
        assert isinstance(task, TaskCheckpoint)
        job = self._job(key, jobs) if task.publish is None else None
        layout, publish = (task.layout, task.publish) if job is None else (job.layout, job.publish)
        if publish is None:
            return None
        assert layout is not None
        kind, at_ms = message.timestamp()
        published_ms = at_ms if kind == TIMESTAMP_LOG_APPEND_TIME else None
        made = checkpoint_of(task, publish, offset_of(message), published_ms)
        return _Combined(layout, made, None if job is None else publish.sequence)

    def _job(self, key: bytes, jobs: Track | None) -> JobCheckpoint | None:
        """The job record with the sequence number of a task's record."""
        if jobs is None or not jobs.messages:
            return None
        job_key = codecs.with_sequence(next(iter(jobs.messages)), codecs.sequence_of(key))
        found = jobs.messages.get(job_key)
        if found is None:
            return None
        job = self._decoded(jobs, job_key, found)
        assert isinstance(job, JobCheckpoint)
        return job

    def _decoded(self, track: Track, key: bytes, message: Message) -> JobCheckpoint | TaskCheckpoint:
        offset, value = offset_of(message), message.value()
        known = track.decoded.get(key)
        if known is not None and known[0] == offset:
            return known[1]
        assert value is not None
        decode = codecs.decode_task if track.id.task else codecs.decode_job
        place = codecs.Place(self._topic, PARTITION, offset)
        found = decode(key, self._key(track, codecs.sequence_of(key)), value, place)
        track.decoded[key] = offset, found
        return found

    def _key(self, track: Track, sequence: int | None) -> CheckpointKey:
        at = track.id
        return CheckpointKey(self._job_name, self._job_id, at.generation, at.task, at.version, sequence)

    def _of(self, track: Track, layout: Layout, checkpoints: tuple[Checkpoint, ...], offset: int) -> CheckpointRecord:
        return CheckpointRecord(self._job_name, self._job_id, track.id.task, layout, checkpoints, offset)

    def _refuse_deleted(self, track: Track) -> None:
        """Raises: MissingState if the newest record was deleted. Retention deletes older ones only, so an older one
        must not take its place."""
        newest = max(map(codecs.sequence_of, track.messages), default=-1)
        if newest < track.highest_deleted:
            raise CorruptRecord(
                f"something other than statemgr deleted the newest checkpoint record of {track.id.task} "
                f"(sequence {track.highest_deleted})",
                hint="find out what else writes to the checkpoint topic: only statemgr may; `statemgr topics repair` "
                "shows the checkpoint that the task can go back to",
                topic=self._topic,
                partition=PARTITION,
                offset=track.deleted_at,
                task=track.id.task,
            )

    def _lost_job(self, track: Track, sequence: int, offset: int) -> MissingState:
        return MissingState(
            f"the checkpoint topic has lost the job record of sequence {sequence}, "
            f"and a checkpoint of {track.id.task} needs it",
            hint="find out what deletes records from the topic; `statemgr topics repair` shows the checkpoints that "
            "tasks can go back to",
            topic=self._topic,
            partition=PARTITION,
            offset=offset,
            task=track.id.task,
        )
