"""What an adoption records about the old job, and whether a run of ``statemgr adopt`` repeats it. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from statemgr.errors import MissingState, PermissionNeeded
from statemgr.flows.opening.adopted_job import certain, gone_on, title
from statemgr.ids import task_index
from statemgr.model.checkpoint import FIRST, Checkpoint
from statemgr.model.jobs.adopted_job import AdoptedJob
from statemgr.operations.adopt.found import OldJob, Request
from statemgr.operations.adopt.look import checkpoint_topic
from statemgr.operations.adopt.old_topics import OldTopics
from statemgr.ports import CheckpointLog
from statemgr.services import Services


def recorded(old: OldTopics, request: Request, found: OldJob, *, in_place: bool) -> AdoptedJob:
    """What the publish of an adoption records about the old job. Raises: UnavailableError, AccessDenied."""
    own = [store for store in found.stores.values() if store.topic.name not in found.input_topics and not in_place]
    ends = {f"{store.topic.name}-{one.number}": one.bounds.end for store in own for one in store.partitions}
    topic = checkpoint_topic(request)
    if topic is not None:
        ends[f"{topic}-0"] = old.bounds(topic, 0).end
    group = request.job if topic is None else None
    return AdoptedJob(
        origin=request.origin.name,
        job=request.job,
        group=group,
        checkpoint_topic=request.checkpoint_topic,
        in_place=in_place,
        changelogs={name: store.topic.name for name, store in found.stores.items()},
        snapshots=tuple(sorted(found.snapshots)),
        given=dict(request.offsets),
        committed=old.committed(group) if group is not None else {},
        ends=ends,
    )


def repeated(
    services: Services, topic: CheckpointLog, old: OldTopics, request: Request, *, in_place: bool, only_settled: bool
) -> Mapping[str, Checkpoint]:
    """Task → its checkpoint, if an earlier run of this adoption has succeeded; empty if the new job has none.

    Args:
        only_settled: wait for no open transaction.

    Raises: PermissionNeeded if the new job has state of something else; UnavailableError, AccessDenied.
    """
    try:
        found = topic.read(only_settled=only_settled)
    except MissingState:
        return {}  # the topic is new
    if not found:
        return {}
    adopted = topic.adopted()
    problem: str | None
    if adopted is None:
        task, record = min(found.items())
        problem = f"{task} has {record.current.checkpoint_id}"
    elif not _repeats(request, adopted, in_place=in_place):
        problem = f"it was adopted from {title(adopted)}, or with other options"
    else:
        untouched = {task_index(task) for task, record in found.items() if record.current.output_sequence == FIRST}
        tasks = next(iter(found.values())).layout.tasks
        why = certain(gone_on(old.metadata, adopted), untouched, tasks)
        problem = why and f"it was adopted already, and since then {why}"
    if problem:
        raise PermissionNeeded(
            f"the job has checkpoints already: {problem}",
            hint="look at them with `statemgr checkpoints list`. To adopt next to it, set another job.name or job.id, "
            "and leave out `--in-place`: two jobs must never write to one changelog",
            job=services.config.job_name,
            topic=services.config.checkpoint_topic,
        )
    return {task: record.current for task, record in found.items()}


def _repeats(request: Request, adopted: AdoptedJob, *, in_place: bool) -> bool:
    """Whether a run asks for what was adopted."""
    asked = request.origin.name, request.job, request.checkpoint_topic, dict(request.offsets), in_place
    done = adopted.origin, adopted.job, adopted.checkpoint_topic, dict(adopted.given), adopted.in_place
    named = request.changelogs.items() <= adopted.changelogs.items()
    return asked == done and named and request.snapshots == bool(adopted.snapshots)
