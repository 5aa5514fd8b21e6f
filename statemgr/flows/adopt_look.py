"""Looks at a job that other software ran, to adopt it. Writes nothing. Steps:

1. find the input offsets: as the old job's consumer group has committed them, or its checkpoints, or as given
2. find the old job's changelogs, by name, by its checkpoints or as given, and refuse a kind of store that is unknown
3. check that the old job is stopped: its group has no member, no transaction is open, and after a while neither the
   ends of its changelogs nor its offsets have moved
4. if the old job's checkpoints say where the changelogs end, leave out later changes, unless compaction may have used
   these to remove earlier values
5. count the changelogs' records, on request
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from statemgr.backends.changelog.restore import certain_ms
from statemgr.errors import InvalidError, LayoutMismatch, MissingState, StatemgrError
from statemgr.flows.adopt_copy import count
from statemgr.flows.adopt_found import OldInput, OldJob, OldPartition, OldStore, Request
from statemgr.ids import check_offsets, source_topic
from statemgr.kafka.old_job import Bounds, OldTopics
from statemgr.model.origins import CheckpointingOrigin, OldCheckpoints
from statemgr.ports import Clock, Progress, TopicInfo


def look(old: OldTopics, clock: Clock, request: Request, *, with_counts: bool = False, progress: Progress) -> OldJob:
    """Look at the old job.

    Raises: InvalidError if the job cannot be adopted as it is, or runs; LayoutMismatch if a topic has another number
        of partitions; MissingState if a topic does not exist; UnavailableError, AccessDenied.
    """
    told = _told(old, request)  # 1
    snapshots = _snapshots(request, told.checkpoints)  # 2
    topics = _changelogs(old, request, told.checkpoints, without=snapshots)
    tasks = request.tasks or (told.checkpoints.tasks if told.checkpoints else next(iter(topics.values())).partitions)
    _check_tasks(told.checkpoints, tasks)
    for info in topics.values():
        _check_partitions(info, tasks)
    offsets, notes = _of_inputs(request, told.offsets)
    inputs = _input_topics(old, request, offsets, tasks)
    _check_group(old, request)  # 3
    before = _position(old, topics)
    _wait(clock, request.settle_s, progress)
    if _told(old, request) != told or _position(old, topics) != before:
        raise running("its offsets or the ends of its changelogs are moving")
    now_ms = clock.time_ns() // 1_000_000
    found = OldJob(
        request.origin,
        request.job,
        tasks,
        {
            name: OldStore(name, info, _partitions(name, info, told, before, tasks, now_ms))
            for name, info in topics.items()
        },
        dict(_inputs(old, request, offsets, inputs)),
        {info.name: info.topic_id for info in inputs.values()},
        told.offsets,
        notes,
        snapshots,
    )
    found = replace(found, notes=(*notes, *_tail_notes(found)))
    if with_counts:  # 5
        counted = {name: _counted(old, found, store, progress) for name, store in found.stores.items()}
        found = replace(found, stores=counted)
    return found


@dataclass(frozen=True)
class _Told:
    """What the old job has committed: source partition → next offset, and its checkpoints if it keeps them."""

    offsets: Mapping[str, int]
    checkpoints: OldCheckpoints | None = None
    end: int = 0


def _told(old: OldTopics, request: Request) -> _Told:
    check_offsets(request.offsets)
    if isinstance(request.origin, CheckpointingOrigin):
        return _of_checkpoints(old, request, request.origin)
    return _Told({**(old.committed(request.job) if request.job is not None else {}), **request.offsets})


def _of_checkpoints(old: OldTopics, request: Request, origin: CheckpointingOrigin) -> _Told:
    topic = request.checkpoint_topic or (origin.checkpoint_topic(request.job) if request.job else None)
    if topic is None:
        raise InvalidError(
            f"a job of {origin.title} is found by its name",
            hint="give it with `statemgr adopt --job NAME`, or name its topic with `statemgr adopt --checkpoint-topic`",
        )
    if topic not in old.describe([topic]):
        raise MissingState(
            "the old job's checkpoint topic does not exist",
            hint="check its name and kafka.bootstrap.servers, or name the topic with `statemgr adopt "
            "--checkpoint-topic`",
            topic=topic,
        )
    bounds = old.bounds(topic, 0)
    records = [record for batch in old.records(topic, 0, bounds.start, bounds.stable) for record in batch]
    try:
        checkpoints = origin.checkpoints(records)
    except StatemgrError as error:
        raise error.with_where(topic=topic) from None
    if not checkpoints.tasks:
        raise MissingState("the old job has no checkpoint", hint="check its name", topic=topic)
    return _Told({**checkpoints.offsets, **request.offsets}, checkpoints, bounds.end)


def _check_tasks(checkpoints: OldCheckpoints | None, tasks: int) -> None:
    if checkpoints is not None and checkpoints.tasks != tasks:
        raise LayoutMismatch(
            f"the old job has checkpoints of {checkpoints.tasks} tasks, but the job has {tasks}",
            hint=f"set job.tasks to {checkpoints.tasks}",
        )


def _partitions(
    store: str,
    info: TopicInfo,
    told: _Told,
    found: Mapping[tuple[str, int], Bounds],
    tasks: int,
    now_ms: int,
) -> tuple[OldPartition, ...]:
    """Where each task's changes are. Raises: InvalidError if a checkpoint does not suit the changelog."""
    checkpoints = told.checkpoints
    if checkpoints is None:
        return tuple(OldPartition(task, found[info.name, task], found[info.name, task].end) for task in range(tasks))
    lag_ms = int(info.config.get("min.compaction.lag.ms", "0"))
    partitions = []
    for task in range(tasks):
        place = checkpoints.by_topic.get((info.name, task))
        bounds = found.get((info.name, place.partition if place is not None else task))
        if place is None or bounds is None:
            raise InvalidError(
                f"the checkpoint of Partition {task} does not say where the changes of the store are",
                hint="let the old job commit once with transactional checkpoints of its state (docs/migrating.md), "
                "then stop it",
                topic=info.name,
                store=store,
            )
        if place.end > bounds.end:
            raise InvalidError(
                f"the checkpoint of Partition {task} names offset {place.end} of the changelog, which ends at "
                f"{bounds.end}: it is not the same topic any more",
                hint="find out who created the topic again",
                topic=info.name,
                partition=place.partition,
            )
        # step 4
        is_exact = place.end == bounds.end or now_ms - checkpoints.made_ms[task] < certain_ms(lag_ms)
        partitions.append(OldPartition(place.partition, bounds, place.end if is_exact else bounds.end, is_exact))
    if len({partition.number for partition in partitions}) < tasks:
        raise InvalidError("two tasks of the old job share a partition of the changelog", topic=info.name, store=store)
    return tuple(partitions)


def _tail_notes(found: OldJob) -> Iterator[str]:
    for store in found.stores.values():
        left_out = sum(partition.bounds.end - partition.end for partition in store.partitions)
        if left_out:
            yield (
                f"store {store.name}: {left_out} records after the old job's checkpoints were not committed; they are "
                "left out, and made again from the input"
            )
        if found.has_checkpoints and not all(partition.is_exact for partition in store.partitions):
            yield (
                f"store {store.name}: the old job's checkpoints are older than min.compaction.lag.ms of its changelog, "
                "so compaction may have removed what they need; the records after them are adopted, too"
            )


def _snapshots(request: Request, checkpoints: OldCheckpoints | None) -> dict[str, tuple[str, ...]]:
    """Store → index blobs by task. Raises: InvalidError if a store is only in blobs, and those are not asked for."""
    if checkpoints is None:
        return {}
    stores = sorted({store for store, _ in checkpoints.snapshots})
    if not request.snapshots:
        only_there = set(stores) - set(checkpoints.changelogs) - set(request.changelogs)
        if only_there and not request.changelogs:
            raise InvalidError(
                f"the old job keeps {listed(only_there)} only in its blob store",
                hint="name that blob store with `statemgr adopt --blobs URI`",
            )
        return {}
    found = {}
    for store in stores:
        by_task = tuple(checkpoints.snapshots.get((store, task), "") for task in range(checkpoints.tasks))
        if store not in request.changelogs and all(by_task):
            found[store] = by_task
    return found


def _changelogs(
    old: OldTopics, request: Request, checkpoints: OldCheckpoints | None, *, without: Collection[str]
) -> dict[str, TopicInfo]:
    wanted = dict(request.changelogs)
    if not wanted and checkpoints is not None:
        wanted = {store: topic for store, topic in checkpoints.changelogs.items() if store not in without}
        if not wanted and not without and checkpoints.topics:
            raise InvalidError(
                "the old job's checkpoints are of version 1, which does not name the stores",
                hint=f"name them with `statemgr adopt --changelog STORE=TOPIC`: its changelogs are "
                f"{listed(checkpoints.topics)}",
            )
    elif not wanted and request.job is not None:
        of_job = [(request.origin.store(topic, request.job), topic) for topic in old.names()]
        for name, topic in of_job:
            if name is not None and wanted.setdefault(name, topic) != topic:
                raise InvalidError(
                    f"the topics {wanted[name]} and {topic} would both be store {name!r}",
                    hint="name the stores with `statemgr adopt --changelog STORE=TOPIC`",
                )
    if not wanted and not without:
        raise MissingState(
            f"no changelog of the old job was found ({request.origin.title}"
            + (f", job {request.job!r})" if request.job else ")"),
            hint="check its name and kafka.bootstrap.servers, or name each one with `statemgr adopt --changelog "
            "STORE=TOPIC`",
        )
    described = old.describe(wanted.values(), with_settings=True)
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
    if request.job is None or isinstance(request.origin, CheckpointingOrigin):
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
    for n, partition in enumerate(store.partitions):
        decoder = found.origin.decoder(store.topic.name, found.committed(n))
        counts.append(
            count(
                old, store.name, store.topic, partition.number, partition.bounds.until(partition.end), decoder, progress
            )
        )
    return replace(store, counts=tuple(counts))


def _wait(clock: Clock, seconds: float, progress: Progress) -> None:
    """Wait, in steps that a bar can show."""
    steps = max(int(seconds * 4), 0)
    for step in range(steps):
        clock.sleep(0.25)
        progress("watch the old job", step + 1, steps)


def listed(names: Collection[str]) -> str:
    """Names for a message."""
    return ", ".join(sorted(names)) or "none"
