"""Looks at a job that other software ran, to adopt it. Writes nothing. Steps:

1. find the input offsets: as the old job's consumer group has committed them, or its checkpoints, or as given
2. find the old job's changelogs and the snapshots of its stores (``changelogs``)
3. check that the old job is stopped: its group has no member, no transaction is open, after a while neither the ends of
   its changelogs nor its offsets have moved, and no row waits in a topic that it wrote for itself
4. find out which part of each changelog is the old job's state
5. check that its records are of the kind that they are taken for (``kinds``), and that they have the keys of the
   input (``keys``)
6. count the changelogs' records, on request
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from statemgr.errors import InvalidError, LayoutMismatch, MissingState, StatemgrError
from statemgr.ids import check_offsets, source_topic
from statemgr.operations.adopt.changelogs import (
    bounds_of,
    check_partitions,
    find_changelogs,
    listed,
    partitions_of,
    partitions_of_table,
    running,
    snapshots_of,
    tail_notes,
)
from statemgr.operations.adopt.copying import count
from statemgr.operations.adopt.found import OldInput, OldJob, OldStore, Request
from statemgr.operations.adopt.internal_topics import internal_topics, refuse_waiting
from statemgr.operations.adopt.keys import compared
from statemgr.operations.adopt.kinds import kind_notes, proved
from statemgr.operations.adopt.old_topics import OldTopics
from statemgr.operations.adopt.origins import CheckpointingOrigin, OldCheckpoints
from statemgr.ports import Clock, Progress, TopicInfo


def look(
    old: OldTopics,
    clock: Clock,
    request: Request,
    *,
    with_counts: bool = False,
    again: bool = False,
    time_ms: Callable[[], int] | None = None,
    progress: Progress,
) -> OldJob:
    """Look at the old job.

    Args:
        again: leave out step 5, which depends on nothing else than the rest of what is found.
        time_ms: the time by which the old job's checkpoints have an age, in epoch milliseconds; None: this machine's.

    Raises: InvalidError if the job cannot be adopted as it is, or runs; LayoutMismatch if a topic has another number
        of partitions; MissingState if a topic does not exist; UnavailableError, AccessDenied.
    """
    told = _told(old, request)  # 1
    snapshots, old_names = snapshots_of(request, told.checkpoints)  # 2
    topics, of_changelogs, others = find_changelogs(old, request, told.checkpoints, without=snapshots)
    tasks = request.tasks or (told.checkpoints.tasks if told.checkpoints else next(iter(topics.values())).partitions)
    _check_tasks(told.checkpoints, tasks)
    for info in topics.values():
        check_partitions(info, tasks)
    offsets, notes = _of_inputs(request, told.offsets)
    inputs = _input_topics(old, request, offsets, tasks)
    _check_group(old, request, told.offsets, next(iter(inputs)))  # 3
    of_job = {name: info for name, info in topics.items() if info.name not in inputs}
    before = bounds_of(old, of_job)
    _wait(clock, request.settle_s, progress)
    if _told(old, request) != told or bounds_of(old, of_job) != before:
        raise running("its offsets or the ends of its changelogs are moving")
    internal = internal_topics(old, request, told.offsets)
    refuse_waiting(old, internal, told.offsets)
    now_ms = clock.time_ns() // 1_000_000 if time_ms is None or told.checkpoints is None else time_ms()  # 4
    parts = {
        name: partitions_of(name, info, told.checkpoints, before, tasks, now_ms)
        if name in of_job
        else partitions_of_table(old, info, offsets)
        for name, info in topics.items()
    }
    found = OldJob(
        request.origin,
        request.job,
        tasks,
        {name: OldStore(name, info, parts[name]) for name, info in topics.items()},
        dict(_inputs(old, request, offsets, inputs)),
        {info.name: info.topic_id for info in inputs.values()},
        told.offsets,
        (*notes, *others),
        snapshots,
        {name: old for name, old in sorted({**of_changelogs, **old_names}.items()) if name != old},
        request.ttls,
        now_ms,
    )
    if not again:  # 5
        proofs = {name: proved(old, request, found, store) for name, store in found.stores.items()}
        found = replace(found, stores={name: replace(of, proof=proofs[name]) for name, of in found.stores.items()})
        of_keys, producers = compared(old, request, found, internal)
        added = (*found.notes, *kind_notes(found), *tail_notes(found), *of_keys)
        found = replace(found, notes=added, producers=producers)
    if with_counts:  # 6
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


def checkpoint_topic(request: Request) -> str | None:
    """Where the old job keeps its checkpoints; None if its offsets are those of a group, or it is not named."""
    origin = request.origin
    if not isinstance(origin, CheckpointingOrigin):
        return None
    return request.checkpoint_topic or (origin.checkpoint_topic(request.job) if request.job else None)


def _of_checkpoints(old: OldTopics, request: Request, origin: CheckpointingOrigin) -> _Told:
    topic = checkpoint_topic(request)
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
        check_partitions(found[name], tasks)
    return {name: found[name] for name in names}


def _check_group(old: OldTopics, request: Request, offsets: Mapping[str, int], topic: str) -> None:
    """Refuse a group that has members. ``topic``: one that exists."""
    if request.job is None or isinstance(request.origin, CheckpointingOrigin):
        return
    group = old.group(request.job)
    if group.members or group.state not in ("EMPTY", "DEAD"):
        raise running(f"its consumer group {group.name} is {group.state} and has {group.members} members")
    if group.state == "DEAD" and old.has_members(group.name, topic):
        raise running(f"its group {group.name} has members, of another protocol than that of consumers")
    if group.state == "DEAD" and not offsets:
        raise InvalidError(
            f"there is no consumer group {group.name}, so it has no offsets",
            hint="check the name; Kafka forgets the offsets of a group that has been empty for "
            "offsets.retention.minutes: then give them with `statemgr adopt --offset TOPIC-PARTITION=OFFSET`",
        )


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
        bounds, decoder = partition.bounds.until(partition.end), found.decoder(store, n)
        counts.append(count(old, store.name, store.topic, partition.number, bounds, decoder, progress))
    return replace(store, counts=tuple(counts))


def _wait(clock: Clock, seconds: float, progress: Progress) -> None:
    """Wait, in steps that a bar can show."""
    steps = max(int(seconds * 4), 0)
    for step in range(steps):
        clock.sleep(0.25)
        progress("watch the old job", step + 1, steps)
