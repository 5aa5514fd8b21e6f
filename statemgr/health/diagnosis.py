"""Looks for the faults of ``docs/runbook.md`` in a job that may be running. Reads only, in a few requests.

Steps of :meth:`Diagnosis.servers`, each of which waits for a few seconds at most:

1. ask the brokers for the replicas of the job's topics
2. ask the blob store for its time, and for one blob of the current checkpoints
3. ask the brokers for the settings of the job's own topics, and whether the changelogs have what the current
   checkpoints need
4. look at the free space of the directories that are on this machine

Steps of :meth:`Diagnosis.tasks`:

1. compare the clocks of the owners with the broker's
2. a task is stuck if its checkpoint is old, and messages have waited for it for as long: the brokers say which was the
   first message after a time, and whether there is one
3. an input partition is held up if a transaction has been open in it for long
4. the lag of a task grows if it was higher at each of three checkpoints in a row, which are some time apart: those that
   are retained, and those that earlier readings have seen

What costs a request for every blob, or writes, is not done here: ``gc``, ``snapshots verify``, ``doctor``.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from statemgr.blobs import open_raw_blob_store
from statemgr.config.factories import BLOB_STORE
from statemgr.errors import AccessDenied, MissingBlob, StatemgrError, UnavailableError
from statemgr.health.checks import Report, Status, blob_directory, check_clock, check_space
from statemgr.health.overview import JobMonitor, JobOverview
from statemgr.health.problems import (
    MOST,
    Fault,
    Point,
    Problem,
    brokers,
    closest,
    in_order,
    late_ms,
    of_clocks,
    of_error,
    of_pace,
    pace_of,
    published,
    recent,
    soonest_late_ms,
    store_address,
)
from statemgr.health.slow_reads import Patient
from statemgr.health.verify_blobs import lost_backups
from statemgr.ids import source_topic
from statemgr.kafka.reader import PartitionReader
from statemgr.kafka.topics import changelog_topic_specs, checkpoint_topic_spec
from statemgr.kafka.transactions.held_up import LONG_MS, HeldUp, held_up
from statemgr.model.checkpoint import BlobMarker, Checkpoint, CheckpointRecord
from statemgr.model.jobs.stages import published_together
from statemgr.ports import BlobStore

if TYPE_CHECKING:
    from confluent_kafka.admin._topic import TopicDescription

#: Seconds that a server may take to answer before it counts as gone.
PATIENCE_S = 3.0
#: Seconds for which an answer is used again; one about the job's own topics.
_FRESH_S, _TOPICS_FRESH_S = 2.0, 5.0
#: Partitions that are asked about for one list.
_MOST_PARTITIONS = 5000
#: Partitions in which one reading looks for a message that waits.
_MOST_LOOKS = 50
#: An offset after every message.
_END = 1 << 63


class Diagnosis:
    """The problems of one job. Safe to use from many threads; it keeps its clients. Close it before the monitor."""

    def __init__(self, monitor: JobMonitor) -> None:
        self._monitor = monitor
        self._config, self._clock = monitor.config, monitor.services.clock
        self._brokers = Patient(self._replicas, self._clock, _FRESH_S)
        self._own_topics = Patient(self._ask_topics, self._clock, _TOPICS_FRESH_S)
        self._store: BlobStore | None = None
        self._blobs = Patient(self._ask_blobs, self._clock, _FRESH_S)
        #: A blob that a current checkpoint needs, as far as known.
        self._known_blob: str | None = None
        self._topics: set[str] = set()
        self._messages = PartitionReader(self._config, self._clock, PATIENCE_S)
        #: Source partition → an offset, and the number of offsets after it that have no message.
        self._empty: dict[str, tuple[int, int]] = {}
        #: Task → the time of a checkpoint → the input then.
        self._points: dict[str, dict[int, Point]] = {}
        #: Source partition → what holds it up.
        self._known: dict[str, HeldUp] = {}

    def problems(self, found: JobOverview) -> list[Problem]:
        """All that is wrong, causes first."""
        of_tasks = self.tasks(found)  # they tell what to ask the servers for
        return in_order([*self.servers(), *of_tasks])

    # --- servers ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Ask all servers, and wait for no answer."""
        for patient in (self._brokers, self._blobs, self._own_topics):
            patient.ask(0)  # they run at the same time

    def servers(self) -> list[Problem]:
        """Problems of the brokers, of the blob store and of this machine's disks."""
        self.begin()
        return [
            *self._asked(self._brokers, Fault.BROKER_GONE),  # 1
            *self._asked(self._blobs, Fault.BLOB_STORE_GONE),  # 2
            *self._asked(self._own_topics, Fault.BROKER_GONE),  # 3
            *self._disks(),  # 4
        ]

    def blobs_gone(self, record: CheckpointRecord) -> Problem | None:
        """The problem of a blob store that does not answer when it is asked about a task; None if it answers."""
        self._remember([record])
        found = self._asked(self._blobs, Fault.BLOB_STORE_GONE)
        return next((one for one in found if one.fault is Fault.BLOB_STORE_GONE), None)

    def _asked(self, patient: Patient[list[Problem]], fault: Fault) -> Sequence[Problem]:
        """What a server answers within a few seconds. ``fault``: the one of a server that does not."""
        answer = patient.ask(PATIENCE_S)
        if answer.error is not None:
            return [of_error(answer.error, self._config)]
        if answer.waiting_s is None or answer.waiting_s < PATIENCE_S / 2:
            return answer.value or ()
        part = store_address(self._config) if fault is Fault.BLOB_STORE_GONE else brokers(self._config)
        detail = f"There has been no answer for {answer.waiting_s:.0f} s."
        return [Problem(fault, self._config.hider()(part), detail)]

    def _replicas(self) -> list[Problem]:
        config = self._config
        own = {config.checkpoint_topic, *(store.changelog_topic for store in config.stores.values())}
        described = self._monitor.metadata.describe(sorted(own | self._topics | set(config.inputs)))
        return list(_lost(described))

    def _ask_topics(self) -> list[Problem]:
        config, monitor = self._config, self._monitor
        try:
            wrong = monitor.metadata.check([checkpoint_topic_spec(config), *changelog_topic_specs(config)])
            lost = list(islice(lost_backups(monitor.services, monitor.reader.records().values()), MOST + 1))
        except AccessDenied:
            return []  # of a user who may read the job, but not the settings of its topics
        return [
            *(Problem(Fault.TOPIC_DAMAGED, one.topic, f"{one.message}. Fix: {one.fix_command}") for one in wrong),
            *(Problem(Fault.TOPIC_DAMAGED, f"{one.task}, store {one.store}", f"{one.problem}.") for one in lost),
        ]

    def _ask_blobs(self) -> list[Problem]:
        store = self._open_store()
        if store is None:
            return []
        report = Report()
        if urlsplit(self._config.blob_uri or "").scheme == "s3":  # a directory would be written to
            before_ms = self._now_ms()
            store_ms = store.administration.time_ms()
            check_clock(report, "the blob store's", store_ms - (before_ms + self._now_ms()) // 2)
        if (known := self._known_blob) is not None:
            try:
                store.stat(known)
            except MissingBlob as error:
                self._remember(self._monitor.reader.records().values())
                # the job has moved on meanwhile, if it needs another one now
                return [of_error(error, self._config)] if self._known_blob == known else []
        wrong = [one for one in report.findings if one.status is Status.PROBLEM]
        return [Problem(Fault.WRONG_CLOCK, "this machine's clock, or the blob store's", one.detail) for one in wrong]

    def _open_store(self) -> BlobStore | None:
        if self._store is None and self._config.blob_uri is not None:
            self._store = open_raw_blob_store(self._config, self._clock)
        return self._store

    def _disks(self) -> Iterator[Problem]:
        for directory in filter(None, (self._config.state_dir, blob_directory(self._config))):
            report = Report()
            try:
                check_space(report, directory, shutil.disk_usage(directory).free)
            except OSError:
                continue  # on another machine
            for one in report.findings:
                if one.status is Status.PROBLEM:
                    yield Problem(Fault.DISK_FULL, str(directory), f"{one.detail}.")

    # --- tasks ------------------------------------------------------------------------------------------------------

    def tasks(self, found: JobOverview) -> list[Problem]:
        """Problems that the checkpoints and the input show. Problems of the brokers are in :meth:`servers`."""
        try:
            records = self._monitor.reader.records()
            owners = {task.task: task.owner for task in found.tasks}
            if published_together(list(records.values())):
                records = dict(list(records.items())[:1])
            self._remember(records.values())
            clocks = (
                of_clocks(one, owners.get(one.task, ""), self._now_ms(), self._config) for one in records.values()
            )
            problems = [problem for several in clocks for problem in several]  # 1
            behind = [one for one in records.values() if _waiting(one, found.lags)]
            problems += self._stuck(found, behind, owners)  # 2
            stuck = {problem.part for problem in problems if problem.fault is Fault.MEMBER_STUCK}
            problems += self._held_up(found)  # 3
            problems += self._growing(found, [one for one in behind if _part(one.task, owners) not in stuck])  # 4
            return problems
        except StatemgrError as error:
            return [of_error(error, self._config)]

    def _stuck(
        self, found: JobOverview, behind: Sequence[CheckpointRecord], owners: Mapping[str, str]
    ) -> Iterator[Problem]:
        now_ms = self._now_ms()
        limits = self._limits(behind)
        late = [one for one in behind if now_ms - published(one.current) > limits[one.task]]
        first = self._first_after(
            {source: now_ms - limits[one.task] for one in late for source in _waiting(one, found.lags)}
        )
        looks, confirmed = iter([True] * _MOST_LOOKS), 0
        for record in late:
            offsets = record.current.input_offsets
            waiting = [at for at in _waiting(record, found.lags) if first.get(at, _END) > offsets[at]]
            lags = {at: found.lags[at] or 0 for at in waiting if self._empty.get(at) != (offsets[at], found.lags[at])}
            # if there are more, the next reading goes on without the partitions that were empty
            looked = (next(looks, False) and self._has_message(at, offsets[at], lag) for at, lag in lags.items())
            if lags and (confirmed >= MOST or any(looked)):
                confirmed += 1
                age_s = (now_ms - published(record.current)) / 1000
                lag = sum(found.lags[source] or 0 for source in waiting)
                wait = "1 message waits" if lag == 1 else f"{lag:,} messages wait"
                detail = f"Its newest checkpoint is {age_s:.0f} s old, and {wait} in {waiting[0]}{_more(waiting)}."
                yield Problem(Fault.MEMBER_STUCK, _part(record.task, owners), detail)

    def _limits(self, behind: Sequence[CheckpointRecord]) -> dict[str, int]:
        """Task → how old its checkpoint may become while messages wait (milliseconds).

        Checkpoints that are far apart raise the limit, but only if messages had waited for the newer one: in an idle
        task, nothing had.
        """
        limits = {one.task: late_ms(one, self._config) for one in behind}
        soonest = soonest_late_ms(self._config)
        pairs = {one.task: pair for one in behind if limits[one.task] > soonest and (pair := closest(one))}
        before = {
            task: {at: offset for at, offset in older.input_offsets.items() if newer.input_offsets.get(at, 0) > offset}
            for task, (newer, older) in pairs.items()
        }
        first = self._first_after(
            {at: published(pairs[task][0]) - soonest for task, offsets in before.items() for at in offsets}
        )
        for task, offsets in before.items():
            if not any(first.get(at, _END) > offset for at, offset in offsets.items()):
                limits[task] = soonest
        return limits

    def _has_message(self, source: str, offset: int, lag: int) -> bool:
        """Whether a consumer would get a message: ends of transactions, and aborted messages, count as lag as well."""
        topic, number = str(source_topic(source)), int(source.rpartition("-")[2])
        try:
            with closing(self._messages.read(topic, number, offset, offset + lag)) as batches:
                if next(batches, None) is not None:
                    return True
        except UnavailableError:
            return False  # a transaction is open there: nobody gets what follows
        except StatemgrError:
            return True
        self._empty[source] = (offset, lag)
        return False

    def _held_up(self, found: JobOverview) -> Iterator[Problem]:
        """Asks about a few partitions, once for each offset at which they stand still."""
        now_ms = self._now_ms()
        first = self._first_after(dict.fromkeys(found.open, now_ms - LONG_MS))
        late = [source for source, (offset, _) in found.open.items() if first.get(source, _END) > offset]
        self._known = {source: one for source, one in self._known.items() if source in late}
        for source in late[:MOST]:
            offset, end = found.open[source]
            known = self._known.get(source)
            if known is None or known.offset != offset:
                place = str(source_topic(source)), int(source.rpartition("-")[2])
                known = self._known[source] = held_up(self._config, place, offset, end)
            detail = self._config.hider()(replace(known, behind=end - offset).describe(now_ms))
            yield Problem(Fault.INPUT_HELD_UP, source, detail)
        if len(late) > MOST:
            yield Problem(
                Fault.INPUT_HELD_UP, f"{len(late) - MOST} more partitions", "The first ones are listed above."
            )

    def _growing(self, found: JobOverview, behind: Sequence[CheckpointRecord]) -> Iterator[Problem]:
        """Compares checkpoints: those that are retained, and those that earlier readings have seen."""
        points = {one.task: self._points.get(one.task, {}) for one in behind}
        missing = {one.task: [at for at in _telling(one) if published(at) not in points[one.task]] for one in behind}
        while any(missing.values()):
            asked = [(task, several.pop()) for task, several in missing.items() if several]
            first = self._first_after({at: published(one) for _, one in asked for at in one.input_offsets})
            for task, one in asked:
                known = {at: offset for at, offset in one.input_offsets.items() if found.lags.get(at) is not None}
                ends = (first.get(at, offset + (found.lags[at] or 0)) for at, offset in known.items())
                points[task][published(one)] = Point(published(one), sum(known.values()), sum(ends))
        for record in behind:
            newest_first = sorted(points[record.task].values(), key=lambda point: -point.at_ms)
            count = recent([point.at_ms for point in newest_first]) or len(newest_first)
            points[record.task] = {point.at_ms: point for point in newest_first[:count]}
            pace = pace_of(newest_first)
            if pace is not None and self._now_ms() - published(record.current) <= late_ms(record, self._config):
                sources = _waiting(record, found.lags)
                lag = sum(found.lags[source] or 0 for source in sources)
                yield from of_pace(record.task, sources, replace(pace, lag=lag))
        self._points = points

    def _first_after(self, times: Mapping[str, int]) -> dict[str, int]:
        """Source partition → the offset of its first message at or after a time. One that has none is missing."""
        asked = {
            (topic, int(source.rpartition("-")[2])): at
            for source, at in list(times.items())[:_MOST_PARTITIONS]
            if (topic := source_topic(source)) is not None
        }
        found = self._monitor.metadata.first_after(asked)
        return {f"{topic}-{number}": offset for (topic, number), offset in found.items()}

    def _remember(self, records: Collection[CheckpointRecord]) -> None:
        """Keep what the checks of the servers ask for."""
        for record in records:
            self._topics |= {t for s in record.current.input_offsets if (t := source_topic(s)) is not None}
        for record in islice(records, 1):
            for store, marker in record.current.state_checkpoint_markers.get(BLOB_STORE, {}).items():
                if isinstance(marker, BlobMarker):
                    blob = marker.blob or self._monitor.reader.chain(record.task, store, marker).snapshot.index
                    self._known_blob = blob.blob_id

    def _now_ms(self) -> int:
        return self._clock.time_ns() // 1_000_000

    def close(self) -> None:
        """Close the blob store's connections."""
        if self._store is not None:
            self._store.close()


def _waiting(record: CheckpointRecord, lags: Mapping[str, int | None]) -> list[str]:
    """The source partitions of a task that have messages after its checkpoint."""
    return [source for source in sorted(record.current.input_offsets) if lags.get(source)]


def _telling(record: CheckpointRecord) -> list[Checkpoint]:
    """Of the retained checkpoints that make a rate the newest, the middle and the oldest one; or else all of them."""
    several = record.checkpoints
    count = recent([published(one) for one in several])
    return [several[0], several[count // 2], several[count - 1]] if count else list(several[:3])


def _more(sources: Sequence[str]) -> str:
    return f" and {len(sources) - 1} more partitions" if len(sources) > 1 else ""


def _part(task: str, owners: Mapping[str, str]) -> str:
    return f"{task}, owner {owners[task]}" if owners.get(task) else task


def _lost(described: Mapping[str, TopicDescription]) -> Iterator[Problem]:
    """Brokers that lack, by what the other brokers say of the partitions."""
    lacks: dict[str, list[str]] = {}
    for topic, description in sorted(described.items()):
        for partition in description.partitions:
            place = f"{topic}-{partition.id}"
            in_sync = {node.id for node in partition.isr or ()}
            leads = partition.leader is not None and partition.leader.id >= 0
            for node in partition.replicas or ():
                if node.id not in in_sync or not leads:
                    lacks.setdefault(f"broker {node.id}", []).append(place if leads else f"{place} (no leader)")
    for broker, places in lacks.items():
        more = f" and {len(places) - MOST} more" if len(places) > MOST else ""
        detail = f"Its replicas are not in sync: {', '.join(places[:MOST])}{more}."
        yield Problem(Fault.BROKER_GONE, broker, detail)
