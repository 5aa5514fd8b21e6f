"""Finds the changelogs of a job that other software ran, and which part of each is the job's state. Writes nothing.

- A changelog is found by its name, by the old job's checkpoints, or as given. One of an unknown kind is refused.
- If the old job's checkpoints say where its state ends in a changelog, later changes are left out. They stay in if
  compaction may have used them to remove earlier values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from statemgr.backends.changelog.restore import certain_ms
from statemgr.errors import InvalidError, LayoutMismatch, MissingState
from statemgr.flows.adopt_found import OldJob, OldPartition, Request
from statemgr.kafka.old_job import Bounds, OldTopics
from statemgr.model.origins import OldCheckpoints
from statemgr.ports import TopicInfo


def find_changelogs(
    old: OldTopics, request: Request, checkpoints: OldCheckpoints | None, *, without: Collection[str]
) -> dict[str, TopicInfo]:
    """Store → its changelog topic. ``without``: stores whose state is taken from snapshots.

    Raises: MissingState if a topic does not exist, or none was found; InvalidError if a changelog cannot be adopted.
    """
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


def snapshots_of(request: Request, checkpoints: OldCheckpoints | None) -> dict[str, tuple[str, ...]]:
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


def check_partitions(info: TopicInfo, tasks: int) -> None:
    """Check that each task has a partition of a topic. Raises: LayoutMismatch."""
    if info.partitions != tasks:
        raise LayoutMismatch(
            f"topic {info.name} has {info.partitions} partitions, but the job has {tasks} tasks and needs one for each",
            hint="adopt the job with job.tasks = the number of partitions, which all changelogs and input topics must "
            "share; leave out a topic with `statemgr adopt --changelog STORE=TOPIC` and task.inputs",
            topic=info.name,
        )


def bounds_of(old: OldTopics, topics: Mapping[str, TopicInfo]) -> dict[tuple[str, int], Bounds]:
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


def partitions_of(
    store: str,
    info: TopicInfo,
    checkpoints: OldCheckpoints | None,
    found: Mapping[tuple[str, int], Bounds],
    tasks: int,
    now_ms: int,
) -> tuple[OldPartition, ...]:
    """Where each task's changes are. Raises: InvalidError if a checkpoint does not suit the changelog."""
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
        is_exact = place.end == bounds.end or now_ms - checkpoints.made_ms[task] < certain_ms(lag_ms)
        partitions.append(OldPartition(place.partition, bounds, place.end if is_exact else bounds.end, is_exact))
    if len({partition.number for partition in partitions}) < tasks:
        raise InvalidError("two tasks of the old job share a partition of the changelog", topic=info.name, store=store)
    return tuple(partitions)


def tail_notes(found: OldJob) -> Iterator[str]:
    """What people should know about the changes after the old job's checkpoints."""
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


def listed(names: Collection[str]) -> str:
    """Names for a message."""
    return ", ".join(sorted(names)) or "none"
