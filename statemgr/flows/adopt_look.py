"""Looks at a job that other software ran, to adopt it. Writes nothing. Steps:

1. find the old job's changelogs, by name or as given, and refuse a kind of store that is unknown
2. find the input offsets: as the old job's consumer group has committed them, or as given
3. check that the old job is stopped: its group has no member, no transaction is open, and after a while neither the
   ends of its changelogs nor its offsets have moved
4. count the changelogs' records, on request
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from statemgr.errors import InvalidError, LayoutMismatch, MissingState
from statemgr.flows.adopt_copy import Counts, count
from statemgr.ids import check_offsets, source_topic
from statemgr.kafka.old_job import Bounds, OldTopics
from statemgr.model.origins import Origin
from statemgr.ports import Clock, Progress, TopicInfo


@dataclass(frozen=True)
class Request:
    """What to look for.

    Attributes:
        job: the name of the old job, which is that of its consumer group; None if everything is given.
        changelogs: store → topic; empty: find them by the old job's name.
        offsets: source partition → next offset, which win over the group's.
        inputs: the input topics; empty: those that the group and ``offsets`` have.
        tasks: how many partitions each topic must have; None: as many as the first changelog.
        settle_s: how long ends and offsets must stand still, in seconds.
    """

    origin: Origin
    job: str | None
    changelogs: Mapping[str, str] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    inputs: Sequence[str] = ()
    tasks: int | None = None
    settle_s: float = 5.0


@dataclass(frozen=True)
class OldStore:
    """A store of the old job: its changelog, and the bounds and, if counted, the content of each partition."""

    name: str
    topic: TopicInfo
    bounds: tuple[Bounds, ...]
    counts: tuple[Counts, ...] = ()


@dataclass(frozen=True)
class OldInput:
    """One partition of an input topic: the next offset, the end of the partition, and who says the offset."""

    source: str
    offset: int
    end: int = field(compare=False)  # others may write to the input
    given: bool = False

    @property
    def behind(self) -> int:
        """Number of offsets from the next one to the end."""
        return self.end - self.offset


@dataclass(frozen=True)
class OldJob:
    """What was found.

    Attributes:
        inputs: of each partition that has an offset; the others have no records.
        all_offsets: also of topics that the new job does not read.
        topic_ids: input topic → its ID in Kafka.
        notes: what else the user should know.
    """

    origin: Origin
    job: str | None
    tasks: int
    stores: Mapping[str, OldStore]
    inputs: Mapping[str, OldInput]
    topic_ids: Mapping[str, str]
    all_offsets: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def input_topics(self) -> list[str]:
        """In the order of their names."""
        return sorted(self.topic_ids)

    @property
    def behind(self) -> int:
        """Input records that follow the adopted offsets, at most: the marks of transactions count, too."""
        return sum(one.behind for one in self.inputs.values())

    @property
    def doubled_at_most(self) -> int:
        """Input records that the new job processes although the adopted state may have their effects already.

        0 for an exactly-once job: its changelogs end with committed transactions, which counting the records shows.
        """
        if self.origin.leaves_out_uncommitted:
            return 0
        counted = [c for store in self.stores.values() for c in store.counts if c.records]
        is_counted = all(store.counts for store in self.stores.values())
        return 0 if is_counted and all(c.transactional for c in counted) else self.behind

    def offsets(self, task: int) -> dict[str, int]:
        """The input offsets of one task."""
        return {s: one.offset for s, one in self.inputs.items() if _partition(s) == task}

    def committed(self, task: int) -> dict[str, int]:
        """Topic → next offset in the partition of one task, for every topic that the old job has read."""
        of_task = ((source, offset) for source, offset in self.all_offsets.items() if _partition(source) == task)
        return {str(source_topic(source)): offset for source, offset in of_task}


def look(old: OldTopics, clock: Clock, request: Request, *, with_counts: bool = False, progress: Progress) -> OldJob:
    """Look at the old job.

    Raises: InvalidError if the job cannot be adopted as it is, or runs; LayoutMismatch if a topic has another number
        of partitions; MissingState if a topic does not exist; UnavailableError, AccessDenied.
    """
    topics = _changelogs(old, request)  # 1
    tasks = request.tasks or next(iter(topics.values())).partitions
    for info in topics.values():
        _check_partitions(info, tasks)
    all_offsets = _all_offsets(old, request)  # 2
    offsets, notes = _of_inputs(request, all_offsets)
    inputs = _input_topics(old, request, offsets, tasks)
    _check_group(old, request)  # 3
    before = _position(old, topics)
    _wait(clock, request.settle_s, progress)
    if _all_offsets(old, request) != all_offsets or _position(old, topics) != before:
        raise running("its offsets or the ends of its changelogs are moving")
    found = OldJob(
        request.origin,
        request.job,
        tasks,
        {
            name: OldStore(name, info, tuple(before[info.name, n] for n in range(tasks)))
            for name, info in topics.items()
        },
        dict(_inputs(old, request, offsets, inputs)),
        {info.name: info.topic_id for info in inputs.values()},
        all_offsets,
        notes,
    )
    if with_counts:  # 4
        counted = {name: _counted(old, found, store, progress) for name, store in found.stores.items()}
        found = replace(found, stores=counted)
    return found


def _changelogs(old: OldTopics, request: Request) -> dict[str, TopicInfo]:
    wanted = dict(request.changelogs)
    if not wanted and request.job is not None:
        of_job = [(request.origin.store(topic, request.job), topic) for topic in old.names()]
        for name, topic in of_job:
            if name is not None and wanted.setdefault(name, topic) != topic:
                raise InvalidError(
                    f"the topics {wanted[name]} and {topic} would both be store {name!r}",
                    hint="name the stores with `statemgr adopt --changelog STORE=TOPIC`",
                )
    if not wanted:
        raise MissingState(
            f"no changelog of the old job was found ({request.origin.title}"
            + (f", job {request.job!r})" if request.job else ")"),
            hint="check its name and kafka.bootstrap.servers, or name each one with `statemgr adopt --changelog "
            "STORE=TOPIC`",
        )
    described = old.describe(wanted.values())
    found = {}
    for name, topic in sorted(wanted.items()):
        if topic not in described:
            raise MissingState("the changelog topic does not exist", topic=topic, store=name)
        problem = request.origin.problem(topic, described[topic].config)
        if problem is not None:
            raise InvalidError(
                f"the changelog cannot be adopted: {problem}",
                hint="name the changelogs to adopt with `statemgr adopt --changelog STORE=TOPIC`, without this one",
                topic=topic,
                store=name,
            )
        found[name] = described[topic]
    return found


def _all_offsets(old: OldTopics, request: Request) -> dict[str, int]:
    """Source partition → next offset."""
    check_offsets(request.offsets)
    return {**(old.committed(request.job) if request.job is not None else {}), **request.offsets}


def _of_inputs(request: Request, offsets: Mapping[str, int]) -> tuple[dict[str, int], tuple[str, ...]]:
    """The offsets of the new job's input, and notes about the others."""
    topics = {str(source_topic(source)) for source in offsets}
    internal = {topic for topic in topics if request.origin.is_internal(topic, request.job or "")} - set(request.inputs)
    wanted = set(request.inputs) or topics - internal
    notes = []
    if internal:
        notes.append(f"topics that the old job wrote for itself are no input: {listed(internal)}")
    if topics - internal - wanted:
        notes.append(f"the old job also read topics that are not in task.inputs: {listed(topics - internal - wanted)}")
    return {s: offset for s, offset in offsets.items() if source_topic(s) in wanted}, tuple(notes)


def _input_topics(old: OldTopics, request: Request, offsets: Mapping[str, int], tasks: int) -> dict[str, TopicInfo]:
    names = list(request.inputs) or sorted({str(source_topic(source)) for source in offsets})
    if not names:
        raise InvalidError(
            "the old job has committed no input offsets",
            hint="give them with `statemgr adopt --offset TOPIC-PARTITION=OFFSET`, one for each partition",
        )
    found = old.describe(names)
    for name in names:
        if name not in found:
            raise MissingState("the input topic does not exist", topic=name)
        _check_partitions(found[name], tasks)
    return {name: found[name] for name in names}


def _check_partitions(info: TopicInfo, tasks: int) -> None:
    if info.partitions != tasks:
        raise LayoutMismatch(
            f"topic {info.name} has {info.partitions} partitions, but the job has {tasks} tasks and needs one for each",
            hint="adopt the job with job.tasks = the number of partitions, which all changelogs and input topics must "
            "share; leave out a topic with `statemgr adopt --changelog STORE=TOPIC` and task.inputs",
            topic=info.name,
        )


def _check_group(old: OldTopics, request: Request) -> None:
    if request.job is None:
        return
    group = old.group(request.job)
    if group.members or group.state not in ("EMPTY", "DEAD"):
        raise running(f"its consumer group {group.name} is {group.state} and has {group.members} members")
    if group.state == "DEAD" and not request.offsets:
        raise InvalidError(
            f"there is no consumer group {group.name}, so it has no offsets",
            hint="check the name; Kafka forgets the offsets of a group that has been empty for "
            "offsets.retention.minutes: then give them with `statemgr adopt --offset TOPIC-PARTITION=OFFSET`",
        )


def running(why: str) -> InvalidError:
    """The error for an old job that is not stopped."""
    return InvalidError(f"the old job is not stopped: {why}", hint="stop it, wait until it has ended, and try again")


def _position(old: OldTopics, topics: Mapping[str, TopicInfo]) -> dict[tuple[str, int], Bounds]:
    """The bounds of every partition of the changelogs; others may still write to the input.

    Raises: InvalidError if a transaction is open, or records were deleted.
    """
    found = {}
    for info in topics.values():
        for partition in range(info.partitions):
            bounds = old.bounds(info.name, partition)
            if bounds.stable < bounds.end:
                raise InvalidError(
                    f"a transaction is open in the changelog, from offset {bounds.stable} of {bounds.end}",
                    hint="stop the old job and wait until the transaction's timeout has passed; find one that never "
                    "ends with `kafka-transactions.sh find-hanging`, and end it with `abort`",
                    topic=info.name,
                    partition=partition,
                    offset=bounds.stable,
                )
            if bounds.start > 0:
                raise InvalidError(
                    f"the changelog begins at offset {bounds.start}: records were deleted, and not by compaction",
                    hint="its state is incomplete: let the old job rebuild it first",
                    topic=info.name,
                    partition=partition,
                )
            found[info.name, partition] = bounds
    return found


def _inputs(
    old: OldTopics, request: Request, offsets: Mapping[str, int], inputs: Mapping[str, TopicInfo]
) -> Iterator[tuple[str, OldInput]]:
    for info in inputs.values():
        for partition in range(info.partitions):
            source = f"{info.name}-{partition}"
            bounds, offset = old.bounds(info.name, partition), offsets.get(source)
            if offset is None:
                if bounds.stable > bounds.start:
                    raise InvalidError(
                        f"the old job has no offset of {source}, which has records",
                        hint=f"give it with `statemgr adopt --offset {source}=OFFSET`, for example {bounds.start} to "
                        "read all of it",
                        topic=info.name,
                        partition=partition,
                    )
                continue
            if not bounds.start <= offset <= bounds.end:
                raise InvalidError(
                    f"the next offset of {source} is {offset}, but the topic has {bounds.start} to {bounds.end}",
                    hint=f"records that the old job has not processed are gone; to go on without them, give an offset "
                    f"that the topic has with `statemgr adopt --offset {source}=OFFSET`",
                    topic=info.name,
                    partition=partition,
                )
            yield source, OldInput(source, offset, bounds.stable, source in request.offsets)


def _counted(old: OldTopics, found: OldJob, store: OldStore, progress: Progress) -> OldStore:
    counts = []
    for n, bounds in enumerate(store.bounds):
        decoder = found.origin.decoder(store.topic.name, found.committed(n))
        counts.append(count(old, store.name, store.topic, n, bounds, decoder, progress))
    return replace(store, counts=tuple(counts))


def _wait(clock: Clock, seconds: float, progress: Progress) -> None:
    """Wait, in steps that a bar can show."""
    steps = max(int(seconds * 4), 0)
    for step in range(steps):
        clock.sleep(0.25)
        progress("watch the old job", step + 1, steps)


def _partition(source: str) -> int:
    return int(source.rpartition("-")[2])


def listed(names: Collection[str]) -> str:
    """Names for a message."""
    return ", ".join(sorted(names)) or "none"
