"""Finds the changelogs of a job that other software ran, and which part of each is the job's state. Writes nothing.

- A changelog is found by its name, by the old job's checkpoints, or as given. One of an unknown kind is refused.
- If the old job's checkpoints say where its state ends in a changelog, later changes are left out. They stay in if
  compaction may have used them to remove earlier values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from statemgr.backends.changelog.integrity import certain_ms
from statemgr.errors import AccessDenied, InvalidError, LayoutMismatch, MissingState
from statemgr.ids import task_name
from statemgr.operations.adopt.found import OldJob, OldPartition, Request
from statemgr.operations.adopt.names import check_given, named, our_name
from statemgr.operations.adopt.old_topics import Bounds, OldTopics
from statemgr.operations.adopt.origins import Kind, OldCheckpoints
from statemgr.ports import TopicInfo


def find_changelogs(
    old: OldTopics, request: Request, checkpoints: OldCheckpoints | None, *, without: Collection[str]
) -> tuple[dict[str, TopicInfo], dict[str, str], tuple[str, ...]]:
    """Store → its changelog topic; store → its name in the old job, if that was found; and notes.

    Args:
        without: stores whose state is taken from snapshots.

    Raises: MissingState if a topic does not exist, or none was found; InvalidError if a changelog cannot be adopted.
    """
    check_given(request.changelogs)
    wanted, theirs, old_names = dict(request.changelogs), set[str](), dict[str, str]()
    if not wanted and checkpoints is not None:
        wanted, old_names = named(item for item in checkpoints.changelogs.items() if our_name(item[0]) not in without)
        if not wanted and not without and checkpoints.topics:
            raise InvalidError(
                "the old job's checkpoints are of version 1, which does not name the stores",
                hint=f"name them with `statemgr adopt --changelog STORE=TOPIC`: its changelogs are "
                f"{listed(checkpoints.topics)}",
            )
    elif not wanted and request.job is not None:
        stores = {topic: request.origin.store(topic, request.job) for topic in old.names()}
        of_job = {topic: store for topic, store in stores.items() if store is not None}
        theirs = of_others(old, request, of_job)
        wanted, old_names = named((store, topic) for topic, store in of_job.items() if topic not in theirs)
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
        hint = request.origin.hint(topic, described[topic].config, {})
        if hint is not None and hint.certain and all(request.origin.kinds[kind].refused for kind in hint.kinds):
            raise refused(name, topic, hint.why, [request.origin.kinds[kind] for kind in hint.kinds])
        found[name] = described[topic]
    notes = (f"topics of other jobs, whose names begin alike, are left out: {listed(theirs)}",) if theirs else ()
    return found, old_names, notes


def of_others(old: OldTopics, request: Request, topics: Collection[str]) -> set[str]:
    """Those of the topics with the old job's name that have the longer name of a job with committed offsets, too.

    A job whose group these credentials may not describe counts as none. Raises: UnavailableError.
    """
    candidates = {topic: request.origin.other_jobs(topic, request.job or "") for topic in topics}
    exist = set()
    for job in sorted({job for of_topic in candidates.values() for job in of_topic}):
        with suppress(AccessDenied):
            if old.committed(job):
                exist.add(job)
    return {topic for topic, of_topic in candidates.items() if exist.intersection(of_topic)}


def snapshots_of(
    request: Request, checkpoints: OldCheckpoints | None
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Store → index blobs by task, and store → its name in the old job.

    Raises: InvalidError if a store is only in blobs, and those are not asked for.
    """
    if checkpoints is None:
        return {}, {}
    stores = sorted({store for store, _ in checkpoints.snapshots})
    if not request.snapshots:
        only_there = set(stores) - set(checkpoints.changelogs)
        if only_there and not request.changelogs:
            raise InvalidError(
                f"the old job keeps {listed(only_there)} only in its blob store",
                hint="name that blob store with `statemgr adopt --blobs URI`",
            )
        return {}, {}
    found = {}
    _, old_names = named((store, "in snapshots") for store in stores if our_name(store) not in request.changelogs)
    for name, store in old_names.items():
        by_task = tuple(checkpoints.snapshots.get((store, task), "") for task in range(checkpoints.tasks))
        if all(by_task):
            found[name] = by_task
    return found, {name: old_names[name] for name in found}


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
            if bounds.start > 0 and "delete" not in info.config["cleanup.policy"]:
                raise _deleted(info.name, partition, bounds.start)
            found[info.name, partition] = bounds
    return found


def refused(store: str, topic: str, why: str, kinds: Collection[Kind]) -> InvalidError:
    """The error for a changelog of a kind that cannot be adopted, which may be one of several."""
    what = "; ".join(f"it has {kind.title}, and {kind.refused}" for kind in kinds)
    return InvalidError(
        f"the changelog cannot be adopted: {why}" + (f"; {what}" if what else ""),
        hint="name the changelogs to adopt with `statemgr adopt --changelog STORE=TOPIC`, without this one",
        topic=topic,
        store=store,
    )


def _deleted(topic: str, partition: int, start: int) -> InvalidError:
    return InvalidError(
        f"the changelog begins at offset {start}: records were deleted, and not by compaction",
        hint="its state is incomplete: let the old job rebuild it first",
        topic=topic,
        partition=partition,
    )


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
        is_compacted = "compact" in info.config["cleanup.policy"]
        until_ms = None
        if is_compacted and place.end < bounds.end:
            until_ms = checkpoints.made_ms[task] + certain_ms(lag_ms)
        if until_ms is None or now_ms < until_ms:
            partitions.append(OldPartition(place.partition, bounds, place.end, is_exact=True, until_ms=until_ms))
        else:
            partitions.append(OldPartition(place.partition, bounds, bounds.end))
    if len({partition.number for partition in partitions}) < tasks:
        raise InvalidError("two tasks of the old job share a partition of the changelog", topic=info.name, store=store)
    return tuple(partitions)


def partitions_of_table(old: OldTopics, info: TopicInfo, offsets: Mapping[str, int]) -> tuple[OldPartition, ...]:
    """Where the changes of a table are whose changelog is its source topic: up to the adopted input offsets.

    Raises: InvalidError if records were deleted; UnavailableError, AccessDenied.
    """
    partitions = []
    for number in range(info.partitions):
        bounds = old.bounds(info.name, number)
        end = offsets.get(f"{info.name}-{number}", bounds.start)
        if bounds.start > 0:
            raise _deleted(info.name, number, bounds.start)
        partitions.append(OldPartition(number, bounds.until(end), end, is_exact=True))
    return tuple(partitions)


def tail_notes(found: OldJob) -> Iterator[str]:
    """What people should know about the old job's checkpoints, and about the changes after them."""
    if found.has_checkpoints:
        yield (
            "the old job's checkpoints do not name stores without a changelog, such as those of side inputs: if it has "
            "one, docs/migrating.md says how to adopt it"
        )
    for store in found.stores.values():
        left_out = {
            task: one.bounds.end - one.end for task, one in enumerate(store.partitions) if one.bounds.end > one.end
        }
        if left_out:
            yield (
                f"store {store.name}: {sum(left_out.values())} records after the old job's checkpoints were not "
                "committed; they are left out, and made again from the input"
            )
        unexplained = [task_name(task) for task in left_out if not found.behind_in(task)]
        if unexplained:
            yield (
                f"store {store.name}: {listed(unexplained)} has such records, but no input that could make them again: "
                "the checkpoint may have an older end of the changelog than the old job had. The old job would restore "
                "the same older state. Compare its totals before you start the new job"
            )
        if found.has_checkpoints and not all(partition.is_exact for partition in store.partitions):
            yield (
                f"store {store.name}: the old job's checkpoints are older than min.compaction.lag.ms of its changelog, "
                "so compaction may have removed what they need; the records after them are adopted, too"
            )


def running(why: str) -> InvalidError:
    """The error for an old job that is not stopped."""
    return InvalidError(f"the old job is not stopped: {why}", hint="stop it, wait until it has ended, and try again")


def listed(names: Collection[str]) -> str:
    """Names for a message."""
    return ", ".join(sorted(names)) or "none"
