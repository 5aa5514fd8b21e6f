"""Copies the valid records of a checkpoint topic to a new topic, and lists the records that it leaves out.

It reads committed records only, and keeps their order, keys, values and deletes. The copy is one transaction, so the
new topic has all of it or nothing. The broker gives times of publication only to later records.

If tasks may go back, the copy ends with a job record that no task refers to. It raises the sequence number of the next
publish of all tasks above those that lost records have used: outputs skip a number that they have.

Steps of :func:`look`:

1. leave out the records that no version of statemgr can have written. Of the checkpoints of other jobs, only the keys
   are looked at, as everywhere
2. leave out the task records whose job record is not there (any more): nobody can read them. Leave out the deletes of
   tasks' newest records
3. of a task that has lost records, leave out what was deleted, and the deletes. Otherwise a delete could be that of the
   newest record, which is refused
4. if the newest layout has no task record left, the one before is current again: leave out the record that retires it,
   and what else there is of the newest one
5. say which tasks have lost their newest record, and where they are then; and which replaced layouts cannot come back
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from confluent_kafka import Message

from statemgr.config import JobConfig
from statemgr.errors import ConfigError, CorruptError, InvalidError, PermissionNeeded, StatemgrError
from statemgr.ids import task_index
from statemgr.kafka.checkpoint_assembly import PARTITION, Assembly, Track, TrackId
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.reader import PartitionReader, offset_of
from statemgr.kafka.topics import BROKER_TIMES, TopicAdmin, TopicSpec, checkpoint_topic_spec
from statemgr.kafka.transactions.publisher import publish_alone
from statemgr.logs import counted
from statemgr.model import codecs
from statemgr.model.checkpoint import CheckpointKey, CheckpointRecord, with_version_one
from statemgr.model.checkpoint_records import JobCheckpoint, publish_of
from statemgr.model.jobs.adopted_job import decode_adopted_job, is_adopted_job
from statemgr.model.jobs.layouts import decode_retired_layout, is_retired_layout
from statemgr.model.jobs.offers import decode_offer, is_offer
from statemgr.model.jobs.permissions import decode_permit, is_permit
from statemgr.ports import Clock
from statemgr.serdes.avro import MARK

_SHOWN = 40
#: More publishes than a topic loses.
_LOST = 1_000_000
_OTHER = "choose another topic with `statemgr topics repair --to`"
_CURRENT_AGAIN = "it retires a layout that is the current one again: the layout that replaced it is lost"
#: Records that are no checkpoints: how to tell them by their keys, and how to decode them.
_OTHERS: Sequence[tuple[Callable[[bytes], bool], Callable[[bytes, bytes | None, codecs.Place], object]]] = (
    (is_permit, decode_permit),
    (is_offer, decode_offer),
    (is_retired_layout, decode_retired_layout),
    (is_adopted_job, decode_adopted_job),
)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A record that is left out: its offset, its key as text, and what is wrong. ``then``: what the job loses with it,
    such as the newest checkpoint of a task; None if it loses nothing."""

    offset: int
    key: str
    why: str
    then: str | None


@dataclass(frozen=True, slots=True)
class Repaired:
    """The number of valid records, the records that are left out, and the number of tasks that the job has had: one
    more than the highest number of a task in a key."""

    copied: int
    left_out: tuple[LeftOut, ...]
    tasks: int

    def refuse_older(self) -> None:
        """Raises: PermissionNeeded if a task would continue at an older checkpoint, or a layout could not come back."""
        lost = [one.then for one in self.left_out if one.then is not None]
        if lost:
            raise PermissionNeeded(
                f"{counted(len(lost), 'record')} that the job may need would be left out: "
                + "; ".join(dict.fromkeys(lost)),
                hint="look for a copy first, for example on another replica; if there is none, add "
                "`--allow-older-checkpoints`: tasks that go back process their input again from there, and produce its "
                "output twice",
            )


def look(config: JobConfig, clock: Clock) -> Repaired:
    """Report what a repair would do. Raises: MissingState, CorruptError, UnavailableError."""
    result, _, found = _sort(config, clock)
    found.numbered(0)  # an error of `copy_valid` is one here, too: before the fence
    return result


def target_config(config: JobConfig, target: str) -> JobConfig:
    """The job with ``target`` as its checkpoint topic. Raises: InvalidError if that is no name of a topic, or the job
    has another use for the topic."""
    try:
        return JobConfig.from_mapping(config.to_mapping(), {"task.checkpoint.topic": target})
    except ConfigError as error:
        raise InvalidError(f"the records cannot go to this topic: {error.message}", hint=_OTHER, topic=target) from None


def check_target(config: JobConfig, clock: Clock) -> None:
    """Check that the job can have its checkpoints on the topic of :func:`target_config`, which need not exist.

    Raises: InvalidError if it has records; TopicMisconfigured, UnavailableError, AccessDenied.
    """
    with TopicAdmin(config, clock) as admin:
        if not admin.exists(config.checkpoint_topic):
            return
        # what an interrupted copy has written may be in a transaction that is still open
        _refuse_records(config, clock, only_settled=True)
        admin.verify([_copy_spec(config)])


def _copy_spec(config: JobConfig) -> TopicSpec:
    """What the new topic must have while records are copied: with the broker's time of the copy, old checkpoints would
    look young."""
    spec, own = checkpoint_topic_spec(config), dict.fromkeys(BROKER_TIMES, "CreateTime")
    never = {name: (value, own[name]) for name, value in BROKER_TIMES.items()}
    return replace(spec, created_with={**spec.created_with, **own}, never={**spec.never, **never})


def copy_valid(config: JobConfig, clock: Clock, target: str, *, allow_older: bool = False) -> Repaired:
    """Copy the valid records to ``target``, which is created if missing. Fence owners first.

    Args:
        allow_older: also if tasks then continue at older checkpoints.

    Raises: PermissionNeeded; as :func:`check_target`.
    """
    new = target_config(config, target)
    result, valid, found = _sort(config, clock)
    if not allow_older:
        result.refuse_older()
    last = found.numbered(clock.time_ns() // 1_000_000) if allow_older else None

    def records() -> Iterator[tuple[bytes | None, bytes | None]]:
        _refuse_records(new, clock)  # an interrupted copy has ended by now, and has left no committed record
        yield from ((message.key(), message.value()) for message in valid)
        if last is not None:
            yield last

    check_target(new, clock)
    with TopicAdmin(new, clock) as admin:
        admin.create_missing([_copy_spec(new)])
        publish_alone(config, clock, "repair", target, records())
        try:
            admin.set(target, BROKER_TIMES)
        except StatemgrError as error:
            command = f"kafka-configs.sh {admin.altering(target, BROKER_TIMES)}"
            error.hint = f"the records are copied: run {command}, then set task.checkpoint.topic = {target}"
            raise
    return result


def _refuse_records(config: JobConfig, clock: Clock, *, only_settled: bool = False) -> None:
    """Raises: InvalidError if the checkpoint topic has a record."""
    if next(_records(config, clock, config.checkpoint_topic, only_settled=only_settled), None) is not None:
        raise InvalidError(
            "the target topic already has records",
            hint=f"if an earlier run copied them, set task.checkpoint.topic; otherwise {_OTHER}",
            topic=config.checkpoint_topic,
        )


def _sort(config: JobConfig, clock: Clock) -> tuple[Repaired, list[Message], _Checkpoints]:
    """All steps. Returns: the report, the records to copy, and the checkpoints that are left."""
    valid: list[Message] = []
    bad: list[tuple[Message, str]] = []
    for message in _records(config, clock, config.checkpoint_topic):  # 1
        why = _problem(config, message)
        if why is None:
            valid.append(message)
        else:
            bad.append((message, why))
    found = _Checkpoints(config, valid)
    lost = found.take_lost()  # 2
    bad += [*lost, *found.newest_deleted([*bad, *lost])]
    damaged = {at for message, _ in bad if (at := found.track_of(message)) is not None}
    current_again = found.current_again(valid)

    def stays(message: Message) -> bool:
        at = found.track_of(message)
        if at is None:
            return message not in current_again
        return not found.is_lost(at) and (at not in damaged or found.has(message))

    valid = [message for message in valid if stays(message)]  # 3, 4
    bad = sorted([*bad, *((message, _CURRENT_AGAIN) for message in current_again)], key=lambda one: offset_of(one[0]))
    found.forget_deletes(damaged)
    left_out = tuple(
        LeftOut(offset_of(message), found.name(message), why, found.then(message)) for message, why in bad
    )  # 5
    return Repaired(len(valid), left_out, found.tasks(damaged)), valid, found


class _Checkpoints:
    """The checkpoints of the job, of valid records."""

    def __init__(self, config: JobConfig, valid: Iterable[Message]) -> None:
        self._config = config
        self._assembly = Assembly(config.job_name, config.job_id, config.checkpoint_topic)
        self._tracks: dict[TrackId, Track] = {}
        #: of the layouts that a rescale has replaced
        self._retired: set[int] = set()
        #: of the records with the highest sequence number that was deleted
        self._deletes: dict[TrackId, Message] = {}
        for message in valid:
            at, key = self.track_of(message), message.key()
            if at is None or key is None:
                self._note_retired(message)
                continue
            track = self._tracks.setdefault(at, Track(at, ()))
            if message.value() is None:
                track.deleted(key, offset_of(message))
                if track.deleted_at == offset_of(message):
                    self._deletes[at] = message
            else:
                track.written(key, message)

    def take_lost(self) -> list[tuple[Message, str]]:
        """Remove the task records whose job record is not there. Returns: these records, and why."""
        lost = []
        for at, track in self._tracks.items():
            for key, message in track.newest_first() if at.task and at.version != 1 else ():
                if self._assembly.single(track, key, message, self._jobs(at)) is None:
                    del track.messages[key]
                    lost.append((message, f"the job record of sequence {codecs.sequence_of(key)} is not there"))
        return lost

    def newest_deleted(self, bad: Iterable[tuple[Message, str]]) -> list[tuple[Message, str]]:
        """The deletes of tasks' newest records. ``bad``: records that are left out, which may be newer."""
        newest = {at: max(track.sequences(), default=-1) for at, track in self._tracks.items()}
        for message, _ in bad:
            at, key = self.track_of(message), message.key()
            if at in newest and at.version != 1 and key is not None:
                newest[at] = max(newest[at], codecs.sequence_of(key))
        current = max((at.generation for at in newest), default=0)
        return [
            (self._deletes[at], "it deletes the newest checkpoint record of the task, which nothing here does")
            for at, track in self._tracks.items()
            # gc deletes all records of an earlier layout
            if at.task and newest[at] < track.highest_deleted and (at.generation == current or newest[at] >= 0)
        ]

    def current_again(self, valid: Iterable[Message]) -> list[Message]:
        """The records that retire the current layout, or a later one: a garbage collection would delete all of it."""
        retired = ((message, self._retired_by(message)) for message in valid if message.value() is not None)
        return [message for message, generation in retired if generation is not None and generation >= self.current]

    def is_lost(self, at: TrackId) -> bool:
        """Whether a track belongs to a layout that has no task record left, and that hides the current one."""
        return at.generation > self.current

    @cached_property
    def current(self) -> float:
        """The newest generation with a task record that can be read; infinity if there is none."""
        of_tasks = (at.generation for at, track in self._tracks.items() if at.task and track.messages)
        return max(of_tasks, default=math.inf)

    def forget_deletes(self, tracks: Iterable[TrackId]) -> None:
        """Forget that records of these tracks were deleted."""
        for at in tracks:
            if at in self._tracks:
                self._tracks[at].highest_deleted = -1

    def tasks(self, damaged: Collection[TrackId]) -> int:
        """One more than the highest number of a task. ``damaged``: tracks that may have no valid record."""
        return max((task_index(at.task) + 1 for at in {*self._tracks, *damaged} if at.task), default=0)

    def has(self, message: Message) -> bool:
        """Whether a checkpoint's record is there and was not deleted or replaced since."""
        at, key = self.track_of(message), message.key()
        return at is not None and key is not None and self._tracks[at].messages.get(key) is message

    def track_of(self, message: Message) -> TrackId | None:
        """The track of a record, or None if it is no checkpoint of this job."""
        key = self._key(message)
        return None if key is None else TrackId(key.layout_generation, key.task, key.record_version)

    def name(self, message: Message) -> str:
        """What the key of a record says."""
        data, key = message.key(), self._key(message)
        if data is None:
            return "(none)"
        if key is None:
            return repr(data[:_SHOWN])[2:-1]
        number = f"version {key.record_version}" if key.sequence is None else f"sequence {key.sequence}"
        return f"{key.task or 'job record'}, layout {key.layout_generation}, {number}"

    def then(self, message: Message) -> str | None:
        """Step 5. See :class:`LeftOut`."""
        data, at = message.key(), self.track_of(message)
        if at is None:
            if data is not None and is_retired_layout(data):
                return self._then_of_retired(message)
            of_this_kind = (
                data is not None and data.startswith(MARK) and not any(is_kind(data) for is_kind, _ in _OTHERS)
            )
            return "an unknown task may go back" if of_this_kind else None
        if not at.task or (at.version == 1 and message.value() is None):
            return None
        if self.is_lost(at):
            tasks = self._tasks_in(self.current)
            return (
                f"the job goes back to the layout with {counted(tasks, 'task')}: `statemgr rescale --tasks {tasks} "
                "--write` then changes the configuration"
            )
        version_one = self._assembly.version_one(self._tracks.get(at._replace(version=1)))
        record = with_version_one(self._newest(at._replace(version=2)), version_one)
        if record is None:
            return f"{at.task} has no checkpoint left"
        if record.offset is not None and record.offset > offset_of(message):
            return None
        return f"{at.task} goes back to checkpoint {record.current.checkpoint_id} (sequence {record.current.sequence})"

    def numbered(self, sequence: int) -> tuple[bytes, bytes] | None:
        """A job record with the content of a current checkpoint, in the newest layout; None if there is no checkpoint.

        It has this sequence number, or one far above those of the topic: a clock that was ahead may have given them.
        """
        # gc and undo leave nothing but deletes of a layout
        there = {at: track for at, track in self._tracks.items() if at.task and at.version != 1 and track.messages}
        record = self._newest(max(there)) if there else None
        if record is None:
            return None
        highest = max(max((*track.sequences(), track.highest_deleted)) for track in there.values())
        sequence = max(sequence, highest + _LOST)
        key = CheckpointKey(record.job_name, record.job_id, record.layout.generation, "", 2, sequence)
        publish = replace(publish_of(record.current), sequence=sequence)
        return codecs.encode_job(key, JobCheckpoint(record.layout, publish))

    def _then_of_retired(self, message: Message) -> str | None:
        generation = self._retired_by(message)
        if generation is None or generation >= self.current or generation in self._retired:
            return None
        tasks = self._tasks_in(generation)
        if not tasks:
            return None
        has = counted(tasks, "task")
        return f"the replaced layout with {has} cannot come back, and `statemgr gc --write` deletes its blobs"

    def _tasks_in(self, generation: float) -> int:
        """The number of tasks in a layout; 0 if it has no checkpoint."""
        tracks = [at for at in self._tracks if at.generation == generation and at.task and at.version != 1]
        return max((record.layout.tasks for at in tracks if (record := self._newest(at)) is not None), default=0)

    def _note_retired(self, message: Message) -> None:
        generation = self._retired_by(message)
        if generation is not None and message.value() is None:
            self._retired.discard(generation)
        elif generation is not None:
            self._retired.add(generation)

    def _retired_by(self, message: Message) -> int | None:
        """The generation of the job's layout that a record retires, as its key says; None if it is another record."""
        data = message.key()
        if data is None or not is_retired_layout(data):
            return None
        try:
            retired = decode_retired_layout(data, None, codecs.Place(self._config.checkpoint_topic, PARTITION, 0))
        except CorruptError:
            return None
        is_own = (retired.job_name, retired.job_id) == (self._config.job_name, self._config.job_id)
        return retired.layout.generation if is_own else None

    def _newest(self, at: TrackId) -> CheckpointRecord | None:
        track, jobs = self._tracks.get(at), self._jobs(at)
        there = jobs.sequences() if jobs is not None else frozenset[int]()
        return None if track is None else self._assembly.record(track, jobs, there)

    def _jobs(self, at: TrackId) -> Track | None:
        return self._tracks.get(TrackId(at.generation, "", 2))

    def _key(self, message: Message) -> CheckpointKey | None:
        """The key of a checkpoint of this job. None: another key, or one that cannot be read."""
        data = message.key()
        try:
            key = codecs.decode_key(data) if data is not None and codecs.is_key(data) else None
        except CorruptError:
            return None
        return key if key is not None and _is_of(self._config, key) else None


def _is_of(config: JobConfig, key: CheckpointKey) -> bool:
    return (key.job_name, key.job_id) == (config.job_name, config.job_id)


def _records(config: JobConfig, clock: Clock, topic: str, *, only_settled: bool = False) -> Iterator[Message]:
    with TopicMetadata(config, clock) as metadata:
        start, end = metadata.bounds(topic, PARTITION, only_settled=only_settled)
    for batch in PartitionReader(config, clock).read(topic, PARTITION, start, end):
        yield from batch


def _problem(config: JobConfig, message: Message) -> str | None:
    """Step 1: why a record is not valid, or None if it is."""
    data, value = message.key(), message.value()
    if data is None:
        return "it has no key"
    place = codecs.Place(config.checkpoint_topic, PARTITION, offset_of(message))
    try:
        for is_kind, decode in _OTHERS:
            if is_kind(data):
                decode(data, value, place)
                return None
        key = codecs.decode_key(data, place)
        if not _is_of(config, key):
            return None
        if value is None:
            return "it deletes a version 1 record, which nothing here does" if key.sequence is None else None
        if key.sequence is None:
            if key.record_version != 1:
                return f"record version {key.record_version} is unknown"
            codecs.decode_record_v1(key, value, place)
        elif key.task:
            codecs.decode_task(data, key, value, place)
        else:
            codecs.decode_job(data, key, value, place)
    except CorruptError as error:
        return error.message
    return None
