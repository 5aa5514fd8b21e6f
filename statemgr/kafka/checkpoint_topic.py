"""Reads the checkpoint topic: the newest record of every task, or every record that is still there.

The codecs of the model decode keys and values.

The topic may hold millions of records, of which compaction will keep a few. The reader checks the key and the
fingerprint of each record, but keeps only records that are not deleted, and decodes them only when somebody asks for
them. Each read continues where the last one ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from confluent_kafka import Message

from statemgr.config import JobConfig
from statemgr.errors import CorruptRecord, MissingState, TopicMisconfigured
from statemgr.kafka.checkpoint_assembly import PARTITION, Assembly, Track, TrackId
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.reader import PartitionReader, offset_of
from statemgr.kafka.topics import TopicWatch
from statemgr.model import codecs
from statemgr.model.checkpoint import CheckpointRecord, with_version_one
from statemgr.model.jobs.adopted_job import AdoptedJob, decode_adopted_job, is_adopted_job
from statemgr.model.jobs.layouts import RetiredLayout, decode_retired_layout, is_retired_layout
from statemgr.model.jobs.offers import Offer, OfferKey, decode_offer, is_offer
from statemgr.model.jobs.permissions import Permit, decode_permit, is_permit
from statemgr.ports import Clock
from statemgr.serdes.avro import HEADER_SIZE, unknown_header

_TAIL = codecs.KEY_TAIL_SIZE
#: Seconds until everything is read again: deletes leave the topic after ``delete.retention.ms``, a day.
_REMEMBERED_S = 6 * 3600.0
#: Seconds of a read after which it goes on to the new end. Compaction may have removed a record below the old one
#: because of a newer record beyond it. It leaves what was written last alone for at least so long.
_SLOW_S = 60.0


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The first offset of the topic and its end, as a leader has them that took over as number ``leader_epoch``."""

    topic_id: str
    leader_epoch: int | None
    start: int
    end: int


@dataclass(slots=True)
class _Seen:
    """Everything of the job below ``position``. The last read of it began at ``monotonic_s`` and ``wall_s``.

    ``by_key``: the first bytes of the keys of a task's records → its track. None means that the key belongs to another
    job. ``version_one``: the same by whole keys of version 1. ``newest``: what a read of all tasks returned last, and
    ``current`` the same with current checkpoints only; None if records were read since.
    """

    bounds: _Bounds
    position: int
    monotonic_s: float = 0.0
    wall_s: float = 0.0
    tracks: dict[TrackId, Track] = field(default_factory=dict)
    by_key: dict[bytes, Track | None] = field(default_factory=dict)
    version_one: dict[bytes, Track | None] = field(default_factory=dict)
    permits: dict[bytes, Permit] = field(default_factory=dict)
    offers: dict[OfferKey, Offer] = field(default_factory=dict)
    retired: dict[int, RetiredLayout] = field(default_factory=dict)
    adopted: AdoptedJob | None = None
    newest: Mapping[str, CheckpointRecord] | None = None
    current: Mapping[str, CheckpointRecord] | None = None

    def continues(self, bounds: _Bounds, position: int) -> bool:
        """Whether the topic still has what was read. ``position``: the offset that reading had reached when ``bounds``
        were asked for.

        Compaction never moves the beginning of a topic, and its end only grows. If either is not so, the topic was
        truncated or created again. A new leader may lack records, and have others at their offsets.
        """
        return replace(self.bounds, end=bounds.end) == bounds and position <= bounds.end

    def age_s(self, monotonic_s: float, wall_s: float) -> float:
        """Seconds since the last read began, by the clock that says more: the monotonic clock stops while the machine
        is suspended, and people can set the wall clock."""
        return max(monotonic_s - self.monotonic_s, abs(wall_s - self.wall_s))


class CheckpointTopic:
    """Implements :class:`statemgr.ports.CheckpointLog`. Safe to use from many threads.

    Args:
        stall_s: seconds without progress after which reading fails (see :class:`PartitionReader`).
        owned: an owner reads, so a topic that was created again is an error.
    """

    def __init__(self, config: JobConfig, clock: Clock, *, stall_s: float | None = None, owned: bool = False) -> None:
        self._config = config
        self._clock = clock
        self._topic = config.checkpoint_topic
        self._metadata = TopicMetadata(config, clock)
        self._watch = TopicWatch(self._topic, self._metadata, clock) if owned else None
        self._reader = PartitionReader(config, clock, stall_s)
        self._lock = threading.Lock()
        self._seen: _Seen | None = None
        self._assembly = Assembly(config.job_name, config.job_id, self._topic)

    def read(
        self, tasks: Collection[str] | None = None, *, only_settled: bool = False, generation: int | None = None
    ) -> Mapping[str, CheckpointRecord]:
        """Checks every record of the job and decodes the newest ones.

        Raises: CorruptRecord, UnavailableError, AccessDenied, MissingState (there is no such topic),
            TopicMisconfigured (it has more than one partition).
        """
        while True:
            began = self._now_s()
            # ask for the bounds before waiting for another thread: its read may already reach them
            position = self._seen.position if self._seen is not None else 0
            bounds = self._bounds(only_settled)
            with self._lock:
                seen = self._read_to(bounds, position, began)
                if seen.age_s(*self._now_s()) > _SLOW_S:
                    continue
                if tasks is not None or generation is not None:
                    return self._newest_of(seen, tasks, generation)
                if seen.newest is None:  # each opening reads all tasks, and a process may open a thousand
                    seen.newest = MappingProxyType(self._newest_of(seen, None, None))
                return seen.newest

    def current(self) -> Mapping[str, CheckpointRecord]:
        with self._lock:
            seen = self._seen
            if seen is None:
                return {}
            if seen.current is None:
                seen.current = MappingProxyType(self._newest_of(seen, None, None, only_current=True))
            return seen.current

    def retired(self) -> Sequence[RetiredLayout]:
        with self._lock:
            if self._seen is None:
                return ()
            # a repair of the topic may have lost all of the layout that had replaced the current one
            found, current = self._seen.retired, self._generation(self._seen)
            return tuple(found[generation] for generation in sorted(found) if generation < current)

    def record_keys(self, generation: int) -> Sequence[bytes]:
        with self._lock:
            tracks = self._seen.tracks if self._seen is not None else {}
            of_generation = [at for at in tracks if at.generation == generation and at.version != 1]
            return [key for at in of_generation for key in tracks[at].messages]

    def job_records(self) -> Collection[int]:
        with self._lock:
            if self._seen is None:
                return ()
            jobs = self._seen.tracks.get(TrackId(self._generation(self._seen), "", 2))
            return jobs.sequences() if jobs is not None else ()

    def permits(self) -> Sequence[Permit]:
        with self._lock:
            return tuple(self._seen.permits.values()) if self._seen is not None else ()

    def offers(self) -> Mapping[OfferKey, Offer]:
        with self._lock:
            return dict(self._seen.offers) if self._seen is not None else {}

    def adopted(self) -> AdoptedJob | None:
        with self._lock:
            return self._seen.adopted if self._seen is not None else None

    def begin_check(self) -> Callable[[int], None]:
        return self._watch.begin_check() if self._watch is not None else lambda end: None

    def ends_at(self, end: int) -> bool:
        # the broker may write the transaction's marker after it has acknowledged the commit; no other owner of the job
        # can write before the marker, because taking the ID over waits for it
        bounds, seen = self._bounds(), self._seen
        return seen is not None and seen.continues(bounds, end) and bounds.end <= end + 1

    def history(self) -> Iterator[CheckpointRecord]:
        """Every committed checkpoint of the job that is still there, one per record, oldest first.

        Skips a checkpoint whose job record compaction has already removed. Raises: as :meth:`read`.
        """
        bounds = self._bounds()
        seen = _Seen(bounds, bounds.start)
        for batch in self._reader.read(self._topic, PARTITION, bounds.start, bounds.end):
            for message in batch:
                track = self._take(seen, message)
                if track is None or not track.id.task or message.value() is None:
                    continue
                key = message.key()
                assert key is not None
                if track.id.version == 1:
                    found = self._assembly.version_one(track)
                else:
                    jobs = seen.tracks.get(TrackId(track.id.generation, "", 2))
                    found = self._assembly.single(track, key, message, jobs)
                if found is not None:
                    yield found

    def was_truncated(self) -> bool:
        """Compaction never moves the first offset, so a higher one means that the topic was truncated."""
        return self._metadata.bounds(self._topic, PARTITION)[0] > 0

    def close(self) -> None:
        self._metadata.close()

    # --- reading ------------------------------------------------------------------------------------------------

    def _bounds(self, only_settled: bool = False) -> _Bounds:
        """Ask for the first offset and the end. Raises: MissingState, TopicMisconfigured, UnavailableError."""
        found = self._metadata.describe([self._topic]).get(self._topic)
        if found is None:
            raise MissingState(
                "the checkpoint topic does not exist",
                hint="check kafka.bootstrap.servers and task.checkpoint.topic; for a new job, run "
                "`statemgr topics create`",
                topic=self._topic,
            )
        if len(found.partitions) != 1:
            raise TopicMisconfigured(
                f"the checkpoint topic has {len(found.partitions)} partitions instead of 1",
                hint="set task.checkpoint.topic to a new topic, or delete this one if nothing else uses it",
                topic=self._topic,
            )
        if self._watch is not None:
            self._watch.compare(str(found.topic_id))
        leader_epoch, start, end = self._metadata.led_bounds(self._topic, PARTITION, only_settled=only_settled)
        if self._watch is not None:
            self._watch.reached(end)
        return _Bounds(str(found.topic_id), leader_epoch, start, end)

    def _now_s(self) -> tuple[float, float]:
        return self._clock.monotonic(), self._clock.time_ns() / 1e9

    def _read_to(self, bounds: _Bounds, position: int, began: tuple[float, float]) -> _Seen:
        seen = self._seen
        if seen is None or not seen.continues(bounds, position) or seen.age_s(*began) >= _REMEMBERED_S:
            seen = self._seen = _Seen(bounds, bounds.start)
        by_key, is_whole = seen.by_key, codecs.is_whole
        for batch in self._reader.read(self._topic, PARTITION, seen.position, bounds.end):
            seen.newest = seen.current = None
            for message in batch:
                # this runs a million times: keep the number of calls low
                key, value = message.key(), message.value()
                try:
                    track = by_key[key[:-_TAIL]]  # type: ignore[index]
                except (KeyError, TypeError):
                    self._take(seen, message)
                    continue
                if track is None:
                    self._take(seen, message)
                elif value is not None and value[:HEADER_SIZE] in track.headers:
                    track.written(key, message)  # type: ignore[arg-type]
                elif value is None and is_whole(key):  # type: ignore[arg-type]
                    track.deleted(key, offset_of(message))  # type: ignore[arg-type]
                else:
                    self._take(seen, message)
            seen.position = offset_of(batch[-1]) + 1
        seen.position = max(seen.position, bounds.end)
        seen.monotonic_s, seen.wall_s = began
        return seen

    def _newest_of(
        self, seen: _Seen, tasks: Collection[str] | None, generation: int | None, *, only_current: bool = False
    ) -> dict[str, CheckpointRecord]:
        versions = self._config.read_versions
        if generation is None:
            generation = self._generation(seen)
        elif generation not in seen.retired and generation != self._generation(seen):
            return {}  # the job has gone back to that layout, or it was collected, and its records were deleted
        of_generation = {at.task for at in seen.tracks if at.generation == generation and at.version in versions}
        wanted = {task for task in of_generation if task and (tasks is None or task in tasks)}
        jobs = seen.tracks.get(TrackId(generation, "", 2))
        there = jobs.sequences() if jobs is not None else frozenset[int]()
        records = {}
        for task in sorted(wanted):
            track = seen.tracks.get(TrackId(generation, task, 2)) if 2 in versions else None
            if track is None:
                newest = None
            else:
                of = self._assembly
                newest = of.current(track, jobs) if only_current else of.record(track, jobs, there)
            old = seen.tracks.get(TrackId(generation, task, 1)) if 1 in versions else None
            record = with_version_one(newest, self._assembly.version_one(old))
            if record is not None:
                records[task] = record
        return records

    def _generation(self, seen: _Seen) -> int:
        """The newest layout generation that records were written for, even if they are deleted."""
        versions = self._config.read_versions
        return max((at.generation for at in seen.tracks if at.version in versions), default=0)

    # --- one record ---------------------------------------------------------------------------------------------

    def _take(self, seen: _Seen, message: Message) -> Track | None:
        """Check a record and add it to its track; None if another job wrote it. Raises: CorruptRecord."""
        key, value, offset = message.key(), message.value(), offset_of(message)
        if key is None:
            raise self._corrupt("it has no key", offset)
        place = codecs.Place(self._topic, PARTITION, offset)
        if not codecs.is_key(key) and self._take_other(seen, key, value, place):
            return None
        track = self._track(seen, key, offset)
        if track is None:
            return None
        if value is None:
            if track.id.version == 1:
                why = f"it deletes the version 1 record of {track.id.task}, which nothing here does"
                raise self._corrupt(why, offset)
            codecs.decode_key(key, place)
            track.deleted(key, offset)
            return track
        if value[:HEADER_SIZE] not in track.headers:
            raise self._corrupt(unknown_header(value), offset)
        track.written(key, message)
        return track

    def _take_other(self, seen: _Seen, key: bytes, value: bytes | None, place: codecs.Place) -> bool:
        """Take a record of the job that is no checkpoint. Of another job's, which newer software may have written, only
        the key is decoded. Returns: whether it is one of a known kind."""
        this_job = self._config.job_name, self._config.job_id
        if is_permit(key):
            permit = decode_permit(key, None, place)
            if value is None:
                seen.permits.pop(key, None)
            elif (permit.job_name, permit.job_id) == this_job:
                seen.permits[key] = decode_permit(key, value, place)
        elif is_offer(key):
            at, _ = decode_offer(key, None, place)
            if (at.job_name, at.job_id) == this_job:
                _, offer = decode_offer(key, value, place)
                if offer is None:
                    seen.offers.pop(at, None)
                else:
                    seen.offers[at] = offer
        elif is_retired_layout(key):
            retired = decode_retired_layout(key, None, place)
            if (retired.job_name, retired.job_id) == this_job:
                if value is None:
                    seen.retired.pop(retired.layout.generation, None)
                else:
                    seen.retired[retired.layout.generation] = decode_retired_layout(key, value, place)
        elif is_adopted_job(key):
            of_job, _ = decode_adopted_job(key, None, place)
            if of_job == this_job:
                _, seen.adopted = decode_adopted_job(key, value, place)
        else:
            return False
        return True

    def _track(self, seen: _Seen, key: bytes, offset: int) -> Track | None:
        if key in seen.version_one:
            return seen.version_one[key]
        known = key[:-_TAIL]
        if known in seen.by_key:
            found = seen.by_key[known]
            if found is not None or codecs.is_whole(key):  # otherwise it may belong to this job
                return found
        at = codecs.decode_key(key, codecs.Place(self._topic, PARTITION, offset))
        tracks, known = (seen.version_one, key) if at.sequence is None else (seen.by_key, known)
        if (at.job_name, at.job_id) != (self._config.job_name, self._config.job_id):
            tracks[known] = None
            return None
        if at.sequence is None and at.record_version != 1:
            raise self._corrupt(f"record version {at.record_version} is unknown (is newer software about?)", offset)
        of = TrackId(at.layout_generation, at.task, at.record_version)
        track = seen.tracks[of] = tracks[known] = Track(of, codecs.value_headers(of.version, of.task))
        return track

    def _corrupt(self, why: str, offset: int) -> CorruptRecord:
        return CorruptRecord(
            f"checkpoint record refused: {why}",
            hint="find out what else writes to the checkpoint topic: only statemgr may. "
            "`statemgr topics repair` lists all such records",
            topic=self._topic,
            partition=PARTITION,
            offset=offset,
        )
