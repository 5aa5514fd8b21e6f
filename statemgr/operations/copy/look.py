"""Looks at a job that is to be copied, and at the new job, and describes the copy. Changes nothing.

Steps:

1. choose the checkpoint of each task (``rollback.find_targets``), and check that the new job's configuration suits it
2. check that the new job has no state: no checkpoint, no published blob, no published state on this machine, and no
   records in its changelogs
3. describe the copy of each chain in ``blob-store``; every other backend of the new job is filled
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from statemgr.backends.blobs.branches import StoreCopy, plan_copy
from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.changelog.integrity import count_records
from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.errors import ConfigError, CorruptError, InvalidError, LayoutMismatch, MissingError, MissingState
from statemgr.flows.committing.commit import Refill
from statemgr.flows.input_left import missing_input
from statemgr.flows.opening.opening_checks import was_published_here
from statemgr.flows.published import common_serdes
from statemgr.flows.rollback import find_targets
from statemgr.ids import source_topic, task_index, task_name
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.keys.partitioners import is_by_input
from statemgr.operations.copy.blobs import published_blob
from statemgr.ports import CheckpointLog
from statemgr.services import Services


@dataclass(frozen=True)
class TaskCopy:
    """One task's copy. ``stores``: store → how its blobs are copied. ``filled``: what is written again."""

    record: CheckpointRecord
    checkpoint: Checkpoint
    stores: Mapping[str, StoreCopy]
    filled: Refill


def look(
    source: Services, target: Services, records: Mapping[str, CheckpointRecord], log: CheckpointLog, ids: Sequence[str]
) -> list[TaskCopy]:
    """What a copy would do, task by task.

    Args:
        records: the source's newest records.
        log: the checkpoint topic of the new job.
        ids: the checkpoints to copy: one that all tasks retain, or one for each task. Empty: the current ones.

    Raises: MissingState if a checkpoint is not retained; ConfigError, LayoutMismatch if the configuration does not
        suit; InvalidError if the new job has state, or the tasks have different serdes; RetryableError, AccessDenied.
    """
    chosen = _chosen(source, records, ids)  # 1
    common_serdes(chosen.values())  # the new tasks share their labels
    _check_config(source, target, records, chosen)
    check_new(target, log, only_settled=True)  # 2
    catalogue = Catalogue(source.transfer)
    return [_planned(source, target, catalogue, records[task], one) for task, one in chosen.items()]  # 3


def _chosen(source: Services, records: Mapping[str, CheckpointRecord], ids: Sequence[str]) -> Mapping[str, Checkpoint]:
    if not records:
        raise MissingState(
            "the job has no checkpoint to copy",
            hint="check job.name, job.id and task.checkpoint.topic",
            job=source.config.job_name,
        )
    tasks = sorted(records, key=task_index)
    if ids:
        return find_targets(records, tasks, ids, option="--checkpoint")
    return {task: records[task].current for task in tasks}


def _check_config(
    source: Services, target: Services, records: Mapping[str, CheckpointRecord], chosen: Mapping[str, Checkpoint]
) -> None:
    if source.config.job_key == target.config.job_key and _brokers(source) & _brokers(target):
        raise ConfigError(
            "the job to copy to has the name and the ID of the job itself, on the same brokers",
            hint="set another job.name or job.id: the copy would fence the job, which may be running",
            key="job.name",
        )
    if _brokers(source) & _brokers(target):
        for name in sorted(target.config.stores.keys() & source.config.stores.keys()):
            topic = target.config.stores[name].changelog_topic
            feeds = KAFKA_CHANGELOG in target.config.stores[name].backup_factories
            if feeds and topic == source.config.stores[name].changelog_topic:
                raise ConfigError(
                    f"the job to copy to has the changelog of the job itself for store {name!r}, {topic}",
                    hint=f"set another stores.{name}.changelog.topic, or remove the key: both jobs would write to it",
                    key=f"stores.{name}.changelog.topic",
                )
    tasks = max(record.layout.tasks for record in records.values()) or source.config.tasks
    if target.config.tasks != tasks:
        raise LayoutMismatch(
            f"the job has {tasks} tasks, but the job to copy to has {target.config.tasks}",
            hint=f"set job.tasks = {tasks} in the configuration of the new job: a key belongs to the same task there",
            job=target.config.job_name,
        )
    durable = {name for name, is_durable in target.durable.items() if is_durable}
    for task, checkpoint in chosen.items():
        if set(checkpoint.stores) != durable:
            raise ConfigError(
                f"checkpoint {checkpoint.checkpoint_id} has the stores {_listed(checkpoint.stores)}, but the job to "
                f"copy to backs up {_listed(durable)}",
                hint="configure the same stores in the new job; add or remove stores after the copy",
                key="stores",
                task=task,
            )
    for name in sorted(durable):
        if name not in source.config.stores:
            raise ConfigError(
                f"the configuration of the source has no store {name!r}",
                hint="configure the stores of the checkpoint",
                key="stores",
            )
        if source.config.stores[name].type != target.config.stores[name].type:
            raise ConfigError(
                f"store {name!r} is of the type {source.config.stores[name].type!r} in the source, and of the type "
                f"{target.config.stores[name].type!r} in the new job",
                hint="a copy keeps the type: set the same one",
                key=f"stores.{name}.type",
            )


def _brokers(services: Services) -> set[str]:
    return {broker.strip() for broker in str(services.config.kafka_client("admin")["bootstrap.servers"]).split(",")}


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "(none)"


def check_retained(records: Mapping[str, CheckpointRecord], tasks: Sequence[TaskCopy]) -> None:
    """Check that the source still retains what is copied; otherwise its blobs may be gone. Raises: MissingState."""
    for one in tasks:
        record, checkpoint_id = records.get(one.record.task), str(one.checkpoint.checkpoint_id)
        if record is None or record.find(checkpoint_id) is None:
            raise MissingState(
                f"the job has dropped checkpoint {checkpoint_id} of {one.record.task} while it was copied",
                hint="run the command again; for a long copy, first raise task.checkpoint.retained of the running job",
                task=one.record.task,
            )


def beginning_at(target: Services, tasks: Sequence[TaskCopy], inputs: Mapping[str, int]) -> list[TaskCopy]:
    """The same copies with other input offsets (source partition → offset): the input is in another cluster, where its
    topics may have other names. Then the offsets of topics that the new job does not read are left out.

    Raises: InvalidError if no task has such an input, if a topic would have offsets of both clusters, if one topic of
        another name has offsets and another one has none, if the new cluster does not have them, or for a job on Spark;
        UnavailableError, AccessDenied.
    """
    for one in tasks:
        if one.checkpoint.batch is not None:
            raise InvalidError(
                "the job runs on Spark, which takes the offsets of its input from the micro-batch",
                hint="leave out `statemgr copy --input`",
                task=one.record.task,
            )
    own = {one.record.task: set(one.checkpoint.input_offsets) for one in tasks}
    known = set().union(*own.values())
    stay = {source_topic(source) for source in known}
    for one in tasks:
        if is_by_input(one.record.layout.partitioner):
            new = {f"{topic}-{task_index(one.record.task)}" for topic in target.config.inputs}
            own[one.record.task] |= new - known
    possible = set().union(*own.values())
    if unknown := sorted(inputs.keys() - possible):
        hint = "if its topic has another name in the new cluster, add it to task.inputs of the new job"
        if source_topic(unknown[0]) in stay.union(target.config.inputs):
            hint = "leave it out: no checkpoint continues there, so it begins as task.input.start says"
        raise InvalidError(
            f"no checkpoint has an offset of {unknown[0]}",
            hint=f"{hint}. The offsets that can be given are those of {_listed(possible)}",
            source=unknown[0],
        )
    topics = {source_topic(source) for source in inputs}
    old = {source for source in possible if source in known or source_topic(source) not in stay}
    if missing := sorted(source for source in old - inputs.keys() if source_topic(source) in topics):
        raise InvalidError(
            f"there is no offset for {missing[0]}, but there are some for its topic",
            hint="give an offset for each partition: the old ones are those of another topic",
            source=missing[0],
        )
    if renamed := sorted(str(topic) for topic in topics - stay):
        if absent := sorted(set(target.config.inputs) - stay - topics):
            raise InvalidError(
                f"there are offsets for {_listed(renamed)}, but none for {absent[0]}: the new job would read all of it",
                hint=f"give its offsets with `statemgr copy --input`, too; {absent[0]}-0=0 if it is to read all of it",
                topic=absent[0],
            )
        stay &= set(target.config.inputs)
    given = {task: {source: inputs[source] for source in sources & inputs.keys()} for task, sources in own.items()}
    moved = [_beginning_at(one, given[one.record.task], stay | topics) for one in tasks]
    for problem in missing_input(target.config, target.clock, inputs, {}):
        raise InvalidError(f"the new job cannot begin there: {problem}", hint="name offsets of the new cluster")
    return moved


def _beginning_at(one: TaskCopy, inputs: Mapping[str, int], stay: Collection[str | None]) -> TaskCopy:
    """``inputs``: those of the task. ``stay``: the topics whose offsets are not left out."""
    checkpoint = one.checkpoint
    offsets = {s: offset for s, offset in {**checkpoint.input_offsets, **inputs}.items() if source_topic(s) in stay}
    same = {source_topic(source) for source in offsets.keys() - inputs.keys()}
    ids = {topic: topic_id for topic, topic_id in checkpoint.input_topic_ids.items() if topic in same}
    moved = replace(checkpoint, input_offsets=offsets, input_topic_ids=ids)
    checkpoints = tuple(moved if other is checkpoint else other for other in one.record.checkpoints)
    return replace(one, record=replace(one.record, checkpoints=checkpoints), checkpoint=moved)


def check_new(target: Services, log: CheckpointLog, *, only_settled: bool) -> None:
    """Check that the job has no state.

    Args:
        only_settled: wait for no open transaction. A copy that was killed may have left one, which ends when the next
            copy fences it.

    Raises: InvalidError; RetryableError, AccessDenied.
    """
    sign = _sign_of_state(target, log, only_settled)
    if sign is not None:
        raise InvalidError(
            f"the job to copy to is not new: {sign}",
            hint="copy to a job that has never run: set job.name, or job.id",
            job=target.config.job_name,
        )


def _sign_of_state(target: Services, log: CheckpointLog, only_settled: bool) -> str | None:
    config = target.config
    try:
        for task, record in sorted(log.read(only_settled=only_settled).items()):
            return f"{task} has checkpoint {record.current.checkpoint_id}"
    except MissingState:
        pass  # the topic is new
    for task in map(task_name, range(config.tasks)):
        if was_published_here(target, task):
            return f"this machine has published state of {task}"
    blob = published_blob(target)
    if blob is not None:
        return f"the blob store has the published blob {blob.blob_id}"
    for store in config.stores.values():
        if KAFKA_CHANGELOG not in (*store.backup_factories, *store.restore_factories):
            continue
        for partition in range(config.tasks):
            try:
                start, end = target.changelog().bounds(store.changelog_topic, partition)
                if only_settled:
                    end = target.changelog().settled_end(store.changelog_topic, partition)
            except MissingState:
                break  # the topic is new
            count = count_records(target.changelog(), store.changelog_topic, partition, start, end)
            if count is not None:
                return f"the changelog {store.changelog_topic} has {count} records in partition {partition}"
    return None


def _planned(
    source: Services, target: Services, catalogue: Catalogue, record: CheckpointRecord, checkpoint: Checkpoint
) -> TaskCopy:
    task, stores, filled = record.task, dict[str, StoreCopy](), set[tuple[str, str]]()
    for name in sorted(checkpoint.stores):
        for factory in target.config.stores[name].backup_factories:
            marker = checkpoint.marker(BLOB_STORE, name) if factory == BLOB_STORE else None
            if marker is None:
                filled.add((factory, name))
                continue
            try:
                stores[name] = plan_copy(catalogue, source.identity(task, name), target.identity(task, name), marker)
            except (MissingError, CorruptError):
                filled.add((factory, name))
    return TaskCopy(record, checkpoint, stores, frozenset(filled))
