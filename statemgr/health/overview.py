"""A job from outside: the read model of ``statemgr top`` and ``statemgr ui``. Fences nobody and writes nothing.

Steps of :meth:`JobMonitor.overview`, each of which costs a few requests however many tasks there are:

1. read what is new on the checkpoint topic, without waiting for open transactions
2. ask once for the IDs of all input topics, and twice for the ends of all input partitions: up to which a consumer of
   committed records receives messages, and where the log ends
3. compare the checkpoints with these

The topic has no times of phases, no failures and no restores: only the metrics and the log of the owner's process have
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from statemgr.config import JobConfig
from statemgr.errors import AccessDenied
from statemgr.health.stages import positions
from statemgr.ids import source_topic, task_index
from statemgr.kafka.topics import TopicAdmin
from statemgr.kafka.transactions.publisher import job_transactional_id, task_transactional_id
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.jobs.stages import published_together, stage_text
from statemgr.reader import JobReader
from statemgr.wiring import open_services

#: The orders in which tasks can be shown.
ORDERS = ("lag", "age", "task")
#: Problems of the input that are listed for one task.
_MOST_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class TaskOverview:
    """One task by its current checkpoint.

    Attributes:
        owner: the process of the last owner that published: machine, process ID and version. Its transactional ID, if
            its configuration withholds them.
        published_ms: by the broker's clock, epoch milliseconds.
        age_s: seconds from then until now, by this machine's clock.
        lag: messages of the input after the checkpoint that can be received. None if a partition's end is unknown.
        stages: store → its stage of a migration, and the configured one if that differs.
        retained: the number of checkpoints that can be restored.
        problems: what is wrong, one sentence each.
    """

    task: str
    owner: str
    epoch: int
    sequence: int
    checkpoint_id: str
    published_ms: int
    age_s: float
    lag: int | None
    stages: Mapping[str, str]
    retained: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobOverview:
    """All tasks of a job, in order, at one moment (``taken_ms``, epoch milliseconds).

    Attributes:
        expected: the configured number of tasks.
        together: whether an owner of the whole job publishes all tasks at once, as on Spark. Each task then shows the
            lag of the whole job.
        lag: messages of all input partitions after the newest checkpoints. None if a partition's end is unknown, or if
            no task has a checkpoint.
        lags: source partition → its share of the lag.
        open: source partition in which a transaction of other software is open → its last stable offset, from which on
            nobody receives anything, and its end.
        permits: one-shot permissions that wait for an opening.
        offers: first snapshots that wait for their owners, also expired ones.
        notes: what is worth knowing about the whole job, one sentence each.
    """

    job: str
    topic: str
    expected: int
    together: bool
    taken_ms: int
    lag: int | None
    lags: Mapping[str, int | None]
    open: Mapping[str, tuple[int, int]]
    tasks: tuple[TaskOverview, ...]
    permits: int
    offers: int
    notes: tuple[str, ...]

    @property
    def oldest_s(self) -> float | None:
        """The age of the oldest current checkpoint, in seconds. None without checkpoints."""
        return max((task.age_s for task in self.tasks), default=None)

    def ordered(self, by: str) -> list[TaskOverview]:
        """The tasks by one of :data:`ORDERS`: those with problems first, then the highest lag or age."""
        if by == "task":
            return list(self.tasks)

        def value(task: TaskOverview) -> float:
            return task.age_s if by == "age" else -1 if task.lag is None else task.lag

        return sorted(self.tasks, key=lambda task: (not task.problems, -value(task)))


class JobMonitor:
    """Takes overviews of a job that may be running. Keeps its clients: the next overview reads only what is new.

    Safe to use from many threads. Use it in a ``with`` block, or :meth:`close` it.
    """

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.services = open_services(config)
        self.reader = JobReader(config, only_settled=True, services=lambda _: self.services)
        #: Asks the brokers about topics.
        self.metadata = TopicAdmin(config, self.services.clock)

    def overview(self, tasks: Collection[str] = ()) -> JobOverview:
        """The job now; only ``tasks``, if there are any.

        Raises: MissingState (no checkpoint topic, or no checkpoint of a named task), CorruptRecord, UnavailableError,
            AccessDenied.
        """
        records = self._records(tasks)  # 1
        inputs, notes = self._inputs(records)  # 2
        now_ms = self.services.clock.time_ns() // 1_000_000
        together = published_together(records)
        # tasks that are published together share one mapping of all partitions: it is compared once
        distinct = {id(record.current.input_offsets): record.current for record in records}
        compared = {key: inputs.compare(current) for key, current in distinct.items()}
        lags = _by_source(compared.values())
        found = tuple(
            self._task(record, compared[id(record.current.input_offsets)], together, now_ms) for record in records
        )  # 3
        absent = self.config.tasks - len(records)
        if absent > 0 and not tasks:
            notes = [*notes, f"{absent} of {self.config.tasks} tasks have no checkpoint yet"]
        return JobOverview(
            job=self.config.job_key,
            topic=self.config.checkpoint_topic,
            expected=self.config.tasks,
            together=together,
            taken_ms=now_ms,
            lag=_sum(lags.values()) if compared else None,
            lags=lags,
            open={
                source: (inputs.stable[source], end)
                for source, end in inputs.ends.items()
                if inputs.stable[source] < end
            },
            tasks=found,
            permits=len(self.reader.permits()),
            offers=len(self.reader.offers()),
            notes=tuple(notes),
        )

    def _records(self, tasks: Collection[str]) -> list[CheckpointRecord]:
        records = self.reader.retaining(tasks=tuple(tasks)) if tasks else self.reader.records().values()
        return sorted(records, key=lambda record: task_index(record.task))

    def _inputs(self, records: Sequence[CheckpointRecord]) -> tuple[_Inputs, list[str]]:
        sources = {source for record in records for source in record.current.input_offsets}
        topics = sorted({topic for source in sources if (topic := source_topic(source)) is not None})
        try:
            described = self.metadata.describe(topics)
            wanted = {
                source: (topic, int(source.rpartition("-")[2]))
                for source in sources
                if (topic := source_topic(source)) in described
            }
            exist = {(name, one.id) for name, topic in described.items() for one in topic.partitions}
            known = {source: place for source, place in wanted.items() if place in exist}
            stable = self.metadata.ends(known.values(), only_settled=True)
            ends = self.metadata.ends(known.values())
        except AccessDenied as error:
            return _Inputs({}, {}, {}), [f"the lag is unknown, because the brokers refuse to tell: {error.message}"]
        ids = {name: str(topic.topic_id) for name, topic in described.items()}
        there = ends.keys() & stable.keys()
        found = [(source, place) for source, place in known.items() if place in there]
        return _Inputs(ids, {at: ends[place] for at, place in found}, {at: stable[place] for at, place in found}), []

    def _task(self, record: CheckpointRecord, compared: _Compared, together: bool, now_ms: int) -> TaskOverview:
        current = record.current
        published_ms = current.published_ms or current.checkpoint_id.millis
        known_as = job_transactional_id(self.config) if together else task_transactional_id(self.config, record.task)
        return TaskOverview(
            task=record.task,
            owner=known_as if current.owner is None else current.owner.label,
            epoch=current.epoch,
            sequence=current.sequence,
            checkpoint_id=str(current.checkpoint_id),
            published_ms=published_ms,
            age_s=max(now_ms - published_ms, 0) / 1000,
            lag=compared.lag,
            stages={one.store: stage_text(one) for one in positions(self.services, [record])},
            retained=len(record.checkpoints),
            problems=(*compared.problems, *self._problems(record)),
        )

    def _problems(self, record: CheckpointRecord) -> Iterable[str]:
        current = record.current
        if record.layout.tasks != self.config.tasks:
            yield f"its layout has {record.layout.tasks} tasks, but job.tasks is {self.config.tasks}"
        if current.outstanding_ttl:
            yield f"{len(current.outstanding_ttl)} published blobs still have a TTL"
        for one in positions(self.services, [record]):
            if one.missing:
                yield f"the checkpoint has no marker of {', '.join(one.missing)} for {one.store}"

    def close(self) -> None:
        """Close the clients."""
        self.metadata.close()
        self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Compared:
    """The input offsets of a checkpoint next to the input topics of now."""

    lags: Mapping[str, int | None]
    lag: int | None
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Input topic → its ID now; source partition → its end and its last stable offset now. What does not exist is
    missing."""

    ids: Mapping[str, str]
    ends: Mapping[str, int]
    stable: Mapping[str, int]

    def compare(self, current: Checkpoint) -> _Compared:
        """What lies after a checkpoint, and what does not fit to it."""
        again = {t for t, known in current.input_topic_ids.items() if self.ids.get(t, known) != known}
        problems = [f"{topic} was deleted and created again" for topic in sorted(again)]
        lags: dict[str, int | None] = {}
        for source, offset in sorted(current.input_offsets.items()):
            end = self.ends.get(source)
            if end is None or source_topic(source) in again:
                lags[source] = None
            elif offset > end:
                lags[source] = None
                problems.append(f"{source} ends at offset {end}, before the checkpoint's {offset}")
            else:
                lags[source] = max(self.stable[source] - offset, 0)
        shown = problems[:_MOST_PROBLEMS]
        if len(shown) < len(problems):
            shown.append(f"… and {len(problems) - len(shown)} more problems of the input")
        return _Compared(lags, _sum(lags.values()), tuple(shown))


def _sum(lags: Iterable[int | None]) -> int | None:
    found = list(lags)
    known = [lag for lag in found if lag is not None]
    return sum(known) if len(known) == len(found) else None


def _by_source(compared: Iterable[_Compared]) -> dict[str, int | None]:
    """Each source once, with its smallest known lag: several tasks may name the same source."""
    lags: dict[str, int | None] = {}
    for one in compared:
        for source, lag in one.lags.items():
            known = lags.get(source)
            lags[source] = lag if known is None else known if lag is None else min(known, lag)
    return lags
