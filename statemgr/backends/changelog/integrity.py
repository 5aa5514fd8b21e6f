"""Whether a changelog has exactly what the job wrote: nothing of others, and everything that a checkpoint needs.

- **Others.** A fill writes a tombstone for every key that the state lacks, so it would delete the keys of other
  writers. It may overwrite records that this job wrote, as its checkpoints show, and records that the user has
  permitted it to overwrite. The opening decides which; a later record that is not the job's own stops the fill.
- **Losses.** Compaction never moves the beginning of a compacted topic. So a changelog that begins after the last fill
  was cut: by another ``cleanup.policy``, or by deleted records. Another topic ID shows that it was deleted and created
  again. An unclean election takes the newest records, and others, also aborted ones, may take their offsets. So a
  marker has the timestamp of its newest record, which is compared wherever the records after the marker are read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from statemgr.errors import AccessDenied, InvalidError, MissingState, PermissionNeeded
from statemgr.model.checkpoint import ChangelogMarker, Marker
from statemgr.ports import Changelog, ChangelogRecord, Clock, Delivered, StoreIdentity, TopicBounds, TopicInfo

#: Unexplained records are counted up to this number.
MOST_COUNTED = 10_000
#: Seconds for which an answer of the brokers is used again, for many tasks and stores.
_FRESH_S = 10.0
#: A task is open if somebody has asked about its changelogs within these seconds: owners do so every minute.
_OPEN_S = 180.0
#: How far ahead of the broker the clock that wrote a record may be, in milliseconds: Kafka's default (KIP-937).
_AHEAD_MS = 3_600_000
#: Part of the cleaner's waiting time that is left unused as a margin; a tenth of the time if that is less.
MARGIN_MS = 60_000


class FillGuard:
    """Knows what fills of this process may overwrite. Safe to use from many threads."""

    def __init__(self, changelog: Callable[[], Changelog]) -> None:
        self._changelog = changelog
        #: topic and partition → ID of the topic, and the offset up to which it may be overwritten
        self._allowed: dict[tuple[str, int], tuple[str, int]] = {}

    def permit_fill(
        self,
        identity: StoreIdentity,
        info: TopicInfo,
        partition: int,
        current: Marker | None,
        retired: Sequence[Marker],
        *,
        overwrite: bool,
    ) -> None:
        """At an opening: permit fills to overwrite all current records. Raises: PermissionNeeded."""
        self._allowed.pop((info.name, partition), None)
        start, end = self._changelog().bounds(info.name, partition)
        tail_is_known = continues(current, info.name, partition, info.topic_id)
        if not overwrite and not tail_is_known:
            self._refuse_others(identity, info, partition, max(start, _explained(info, partition, retired)), end)
        self._allowed[info.name, partition] = info.topic_id, end

    def check_fill(
        self, identity: StoreIdentity, info: TopicInfo, partition: int, base: Marker | None, start: int, end: int
    ) -> None:
        """Before a fill: check the current records. Raises: PermissionNeeded if others wrote since the opening."""
        topic_id, allowed = self._allowed.get((info.name, partition), (info.topic_id, 0))
        if topic_id != info.topic_id:
            allowed = 0
        explained = _explained(info, partition, [base] if base is not None else [])
        self._refuse_others(identity, info, partition, max(start, allowed, explained), end)

    def _refuse_others(self, identity: StoreIdentity, info: TopicInfo, partition: int, start: int, end: int) -> None:
        count = count_records(self._changelog(), info.name, partition, start, end)
        if count is None:
            return
        raise PermissionNeeded(
            f"the changelog has {count} records that this job did not write, and the next commit would delete them",
            hint=f"set stores.{identity.store}.changelog.topic to a topic that nobody else writes to; to delete the "
            "records, use `statemgr permit --overwrite-changelog`, or open the job once with overwrite_changelog=True",
            **identity.where,
            topic=info.name,
            partition=partition,
        )


class OwnRecords:
    """Notices records that others write to a changelog between two commits of this process: the next marker would
    include them.

    Offsets usually show that nobody else has written: the records of a transaction directly follow the end mark of the
    previous one. If they do not (others wrote, or a transaction was aborted), the changelog is read before the
    transaction commits, from the newest record of the checkpoint on.
    """

    def __init__(self, changelog: Callable[[], Changelog]) -> None:
        self._changelog = changelog
        #: topic, its ID, partition → where the known records end, and the offset that comes next if nobody else writes;
        #: None if nobody knows, because records were sent and their offsets were not learned
        self._ends: dict[tuple[str, str, int], tuple[int, int | None]] = {}

    def known_until(self, info: TopicInfo, partition: int, offset: int) -> None:
        """Note that all records below an offset are known."""
        self._ends[info.name, info.topic_id, partition] = offset, offset

    def sends(self, target: ChangelogMarker) -> int | None:
        """Call this before records are sent. Returns: the offset that they get if nobody else writes, or None."""
        place = target.topic, target.topic_id or "", target.partition
        end, expected = self._ends.get(place, (target.offset, None))
        self._ends[place] = end, None
        return expected

    def check_delivered(
        self, identity: StoreIdentity, target: ChangelogMarker, delivered: Delivered, expected: int | None
    ) -> None:
        """Before a commit: all records since the last one are its own. ``expected``: what :meth:`sends` has returned.

        Raises: InvalidError; MissingState if records of the last one are gone.
        """
        place = target.topic, target.topic_id or "", target.partition
        end, _ = self._ends.get(place, (target.offset, None))
        inside = delivered.end - delivered.start - delivered.records
        others, lost = str(inside) if inside else None, None
        if not inside and delivered.start != expected:
            lost, tail = read_tail(self._changelog(), target, delivered.start)
            others = _counted(len([one for one in batch if one.offset >= end]) for batch in tail)
        if others is not None:
            raise InvalidError(
                f"somebody else has written {others} records to the changelog since the last commit",
                hint=f"stop the other writer, or set stores.{identity.store}.changelog.topic to a topic that "
                "nobody else writes to; then open the job again: it writes its whole state over those records",
                **identity.where,
                topic=target.topic,
                partition=target.partition,
                offset=end,
            )
        if lost is not None:
            raise MissingState(f"the changelog has lost state: {lost}", topic=target.topic, partition=target.partition)
        self._ends[place] = delivered.end, delivered.end + 1


def unexplained(changelog: Changelog, topic: str, partition: int, markers: Sequence[Marker]) -> str | None:
    """The number of records that no marker explains, as text for a message; None if there are none. Waits for no open
    transaction: its records are not counted. Raises: MissingState if there is no such topic."""
    info, (start, _) = changelog.describe(topic), changelog.bounds(topic, partition)
    end = changelog.settled_end(topic, partition)
    return count_records(changelog, topic, partition, max(start, _explained(info, partition, markers)), end)


def count_records(changelog: Changelog, topic: str, partition: int, start: int, end: int) -> str | None:
    """The number of committed records from ``start`` to ``end`` as text for a message; None if there are none."""
    return _counted(map(len, changelog.read(topic, partition, start, end))) if start < end else None


def _counted(numbers: Iterable[int]) -> str | None:
    """The sum as text for a message; None if it is 0. Stops at a limit."""
    count = 0
    for number in numbers:
        count += number
        if count >= MOST_COUNTED:
            return f"at least {MOST_COUNTED:,}"
    return f"{count:,}" if count else None


def continues(base: Marker | None, topic: str, partition: int, topic_id: str | None) -> bool:
    """Whether a marker belongs to this changelog. Compares topic IDs only if both are known: version 1 markers have
    none and are accepted by name."""
    if not isinstance(base, ChangelogMarker) or (base.topic, base.partition) != (topic, partition):
        return False
    return base.topic_id is None or topic_id is None or base.topic_id == topic_id


def extended(marker: ChangelogMarker, by: Delivered) -> ChangelogMarker:
    """The marker after more records."""
    return replace(marker, offset=by.end, newest_ms=by.newest_ms, newest_deletes=by.newest_deletes)


def _explained(info: TopicInfo, partition: int, markers: Sequence[Marker]) -> int:
    """The offset below which all records are the job's own."""
    return max(
        (
            marker.offset
            for marker in markers
            if isinstance(marker, ChangelogMarker) and continues(marker, info.name, partition, info.topic_id)
        ),
        default=0,
    )


# --- losses ------------------------------------------------------------------------------------------------------


def loss_of(marker: ChangelogMarker, found: TopicBounds | None) -> str | None:
    """What a restore from the marker would lack; None if nothing, or if the partition cannot be asked at present.

    ``found``: the topic of the marker; None if it does not exist.
    """
    if found is None:
        return "it does not exist"
    if marker.topic_id not in (None, found.topic_id):
        return "it was deleted and created again after the checkpoint"
    if marker.partition >= found.partitions:
        return f"it has only {found.partitions} partitions"
    if marker.partition not in found.bounds:
        return None
    start, end = found.bounds[marker.partition]
    if marker.offset > end:
        return f"it ends at offset {end}: records of the checkpoint are gone"
    if marker.start < start:
        return f"it begins at offset {start}: records were deleted, and not by compaction"
    return None


def read_tail(
    changelog: Changelog, marker: ChangelogMarker, end: int, *, checked: bool = False
) -> tuple[str | None, Iterator[Sequence[ChangelogRecord]]]:
    """What a restore from the marker would lack although the changelog is long enough, None if nothing; and the
    committed records from the marker to ``end``, in batches. Its newest record is read along with them.

    Compaction removes an old delete, too. So nobody notices that a delete is lost when it is that old. Raises: as
    :meth:`Changelog.read`.
    """
    if marker.newest_ms is None:
        return None, changelog.read(marker.topic, marker.partition, marker.offset, end, checked=checked)
    newest = marker.offset - 1
    batches = iter(changelog.read(marker.topic, marker.partition, newest, max(end, marker.offset), checked=checked))
    first: Sequence[ChangelogRecord] = next(batches, ())
    found_ms = None
    if first and first[0].offset == newest:
        found_ms, first = first[0].timestamp_ms, first[1:]
    lost = None
    gone = "the newest record of the checkpoint is gone, and"
    if found_ms is None:
        doubt = _doubt(changelog, marker)
        lost = None if doubt is None else f"{gone} nothing is at its offset {newest}{doubt}"
    elif found_ms != marker.newest_ms:
        lost = f"{gone} another one is at its offset {newest}"
    return lost, chain([first] if first else [], batches)


def _doubt(changelog: Changelog, marker: ChangelogMarker) -> str | None:
    """None if compaction may have removed the newest record of a marker, because it is an old delete. Otherwise what to
    add to a message."""
    if not marker.newest_deletes or marker.newest_ms is None:
        return ""
    keeps_ms = deletes_kept_ms(changelog.describe(marker.topic).config)
    try:
        return None if changelog.time_ms() - (marker.newest_ms - _AHEAD_MS) >= keeps_ms else ""
    except (AccessDenied, InvalidError) as error:
        return (
            f". It was a delete, which compaction removes when it is old, but the broker does not tell its time: "
            f"{error.message}. Allow this user to create, write and delete topics that start with __statemgr_doctor_"
        )


def certain_ms(waited_ms: int) -> int:
    """The part of the cleaner's waiting time that is safe to rely on, in milliseconds."""
    return waited_ms - min(MARGIN_MS, waited_ms // 10)


def deletes_kept_ms(settings: Mapping[str, str]) -> int:
    """For how long compaction certainly keeps the deletes of a topic with these settings, in milliseconds."""
    return certain_ms(int(settings.get("delete.retention.ms", "0")))


def ends_with(changelog: Changelog, marker: ChangelogMarker, end: int) -> bool:
    """Whether the changelog has the newest record of a marker, and no committed one from there to ``end``.

    Raises: as :meth:`Changelog.read`.
    """
    if end < marker.offset:
        return False
    loss, tail = read_tail(changelog, marker, end)
    return loss is None and not any(tail)


class Losses:
    """Asks about all changelogs of a job at once, in three requests: about the partitions of the tasks that are open
    here, or about all if a task has just been opened. Safe to use from many threads."""

    def __init__(self, changelog: Callable[[], Changelog], topics: Collection[str], clock: Clock) -> None:
        self._changelog = changelog
        self._topics = frozenset(topics)
        self._clock = clock
        self._lock = threading.Lock()
        self._asked = float("-inf")
        self._found: Mapping[str, TopicBounds] = {}
        #: The partitions that the answer has; None for all of them.
        self._answered: frozenset[int] | None = None
        #: Partition → when somebody asked about it last.
        self._sought: dict[int, float] = {}

    def of(self, marker: ChangelogMarker) -> str | None:
        """What a restore from the marker would lack; None if nothing. Raises: UnavailableError, AccessDenied."""
        with self._lock:
            now, was_asked = self._clock.monotonic(), False
            if now - self._asked > _FRESH_S:
                is_open = frozenset(number for number, asked in self._sought.items() if now - asked < _OPEN_S)
                was_asked = self._ask(marker.topic, is_open or None)
            self._sought[marker.partition] = now
            if self._answered is not None and marker.partition not in self._answered:
                was_asked = self._ask(marker.topic, None)
            loss = loss_of(marker, self._found.get(marker.topic))
            if loss is not None and not was_asked:  # the marker may be newer than the answer
                self._ask(marker.topic, self._answered)
                loss = loss_of(marker, self._found.get(marker.topic))
            return loss

    def _ask(self, topic: str, only: frozenset[int] | None) -> bool:
        asked = self._clock.monotonic()
        self._found = self._changelog().survey(self._topics | {topic}, only)
        self._asked, self._answered = asked, only
        return True
