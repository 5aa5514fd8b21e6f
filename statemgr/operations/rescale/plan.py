"""What a rescale does, before anything is written: the checkpoint that it begins with, and the new layout. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from statemgr.config import JobConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import ConfigError, FencedError, InvalidError, MissingState
from statemgr.flows.published import common_batch, common_serdes
from statemgr.flows.rollback import check_sources, find_targets
from statemgr.ids import task_name
from statemgr.model.checkpoint import (
    FIRST,
    SEQUENCE,
    Attachment,
    ChangelogMarker,
    Checkpoint,
    CheckpointRecord,
    Layout,
    MicroBatch,
)
from statemgr.model.checkpoint_records import Inputs
from statemgr.model.keys.partitioners import is_by_input
from statemgr.model.keys.processor_keys import RECORD

#: The end of the name of a changelog that a rescale has made.
_GENERATION = re.compile(r"-g(\d+)\Z")
#: Kafka's limit.
_LONGEST_TOPIC = 249


def overtaken(config: JobConfig) -> FencedError:
    """The layout is another one than when the command began."""
    return FencedError(
        "somebody else has changed the number of tasks meanwhile",
        hint="`statemgr checkpoints list` shows the tasks that the job has now; run the command again if it still fits",
        job=config.job_name,
    )


def changelog_key(store: str) -> str:
    """The configuration key with the name of a store's changelog."""
    return f"stores.{store}.changelog.topic"


def topic_of_generation(store: str, topic: str, generation: int) -> str:
    """A changelog that no layout of the job has used: the name of another one with the new generation.

    The new ending replaces that of an earlier layout. A later generation is part of the name: the configuration of
    another job has brought it along, and the job may reach that generation itself. Raises: ConfigError.
    """
    found = _GENERATION.search(topic)
    base = topic[: found.start()] if found is not None and int(found[1]) < generation else topic
    name = f"{base}-g{generation}"
    if len(name) > _LONGEST_TOPIC:
        raise ConfigError(
            f"the name of the new changelog, {name}, is longer than {_LONGEST_TOPIC} characters",
            hint=f"set {changelog_key(store)} to a shorter name",
            store=store,
        )
    return name


def changes_in_force(config: JobConfig, records: Mapping[str, CheckpointRecord]) -> Mapping[str, int | str]:
    """Configuration key → its value in the current layout, if a rescale has changed it; empty if nothing differs.

    Without a marker, nothing says which changelog a store would have. Then a name fits if the store has left this
    changelog, or if it ends with the layout's generation. If one fits, the configuration is that of the layout, and the
    names of the other stores are right: they may have been added since.
    """
    checkpoints = [record.current for record in records.values()]
    layout = next(iter(records.values())).layout
    changes: dict[str, int | str] = {"job.tasks": layout.tasks}
    guesses: dict[str, int | str] = {}
    fits = layout.generation <= 1
    for store, configured in config.stores.items():
        topic = configured.changelog_topic
        used = _changelog_in(checkpoints, store)
        if used == topic:
            fits = True
        elif used is not None:
            changes[changelog_key(store)] = used
        elif configured.durable:
            left = {marker.topic for one in checkpoints for marker in one.retired_changelogs.get(store, ())}
            fits = fits or topic in left or topic.endswith(f"-g{layout.generation}")
            guesses[changelog_key(store)] = topic_of_generation(store, topic, layout.generation)
    if not fits:
        changes |= guesses
    return {} if changes == {"job.tasks": config.tasks} else changes


def _changelog_in(checkpoints: Iterable[Checkpoint], store: str) -> str | None:
    """The changelog that a store has in some checkpoints."""
    markers = [checkpoint.marker(KAFKA_CHANGELOG, store) for checkpoint in checkpoints]
    return next((marker.topic for marker in markers if isinstance(marker, ChangelogMarker)), None)


@dataclass(frozen=True)
class RescalePlan:
    """A job's records, the checkpoint of each task to begin with, and the new number of tasks.

    ``config`` has the old number of tasks. ``grouping`` has the types of the columns that a Spark processor groups by;
    None without a processor, and before its attachment is read. Nothing but the processor writes to a store of the job.
    """

    config: JobConfig
    records: Mapping[str, CheckpointRecord]
    targets: Mapping[str, Checkpoint]
    tasks: int
    grouping: str | None = None

    @property
    def before(self) -> Layout:
        """The current layout."""
        return next(iter(self.records.values())).layout

    @property
    def after(self) -> Layout:
        """The layout to come."""
        return Layout(self.before.generation + 1, self.tasks, self.before.partitioner)

    @property
    def kept(self) -> Sequence[str]:
        """IDs of the checkpoints that tasks keep beyond the retention. They stay with the old layout."""
        return sorted({one for record in self.records.values() for one in record.kept})

    @property
    def stores(self) -> Sequence[str]:
        """The stores that are backed up, in order."""
        return [name for name, store in self.config.stores.items() if store.durable]

    @property
    def processor(self) -> Attachment | None:
        """The attachment of a Spark processor, which only the first task has."""
        attachments = self.targets[task_name(0)].attachments
        return next((one for one in attachments if one.name == RECORD), None)

    @cached_property
    def changes(self) -> Mapping[str, int | str]:
        """Configuration key → its new value.

        A store gets the name of a new changelog also if it has no changelog now: the topic of an earlier stage of a
        migration may exist, with the old number of partitions, and a way back to changelogs would need it.
        """
        topics = {changelog_key(name): self._new_topic(name) for name in self.stores}
        return {"job.tasks": self.tasks, **topics}

    @property
    def new_topics(self) -> Mapping[str, str]:
        """Store → its new changelog, if it has one."""
        stores = self.new_config.stores
        return {
            name: stores[name].changelog_topic
            for name in self.stores
            if KAFKA_CHANGELOG in (*stores[name].backup_factories, *stores[name].restore_factories)
        }

    @cached_property
    def new_config(self) -> JobConfig:
        """The configuration of the new layout."""
        return JobConfig.from_mapping(self.config.to_mapping(), self.changes)

    def _new_topic(self, store: str) -> str:
        used = _changelog_in(self.targets.values(), store)
        return topic_of_generation(store, used or self.config.stores[store].changelog_topic, self.after.generation)

    # --- what the new tasks begin with ------------------------------------------------------------------------

    def sources(self, task: int) -> list[int]:
        """The old tasks that may have keys of a new one.

        A key's old and new task are its hash modulo the old and the new number of tasks, so both are equal modulo a
        common divisor of these numbers.
        """
        divisor = self.divisor
        return [source for source in range(self.before.tasks) if source % divisor == task % divisor]

    @property
    def divisor(self) -> int:
        """The greatest common divisor of the numbers of tasks: the parts that can be rescaled alone."""
        a, b = self.before.tasks, self.tasks
        while b:
            a, b = b, a % b
        return a

    @cached_property
    def inputs(self) -> Sequence[Inputs]:
        """The input offsets of each new task.

        If the task is the partition of the input, a task gets the offsets of its partitions; a partition whose number
        is not that of a task belongs to the task of its number modulo the number of tasks. Otherwise all tasks share
        the job's offsets.

        Raises: InvalidError if two tasks have other offsets of one partition.
        """
        offsets: dict[str, int] = {}
        ids: dict[str, str] = {}
        for task, target in self.targets.items():
            for source, offset in target.input_offsets.items():
                if offsets.setdefault(source, offset) != offset:
                    raise InvalidError(
                        f"{task} continues {source} at offset {offset}, and another task at {offsets[source]}",
                        hint="a job can be rescaled if its tasks agree on the input offsets that they share",
                        task=task,
                    )
            ids |= target.input_topic_ids
        if not is_by_input(self.before.partitioner):
            return [Inputs(offsets, ids)] * self.tasks
        own: list[dict[str, int]] = [{} for _ in range(self.tasks)]
        for source, offset in offsets.items():
            own[int(source.rpartition("-")[2]) % self.tasks][source] = offset
        return [Inputs(of_task, ids) for of_task in own]

    @cached_property
    def output(self) -> tuple[Sequence[tuple[Attachment, ...]], MicroBatch | None]:
        """The attachments of each new task, which are the last output of an engine, and its micro-batch.

        If there are fewer tasks than before, a task gets those of several old tasks, in their order.
        """
        batch = common_batch(self.targets.values())
        found: list[list[Attachment]] = [[] for _ in range(self.tasks)]
        for number in range(self.before.tasks):
            target = self.targets[task_name(number)]
            rows = [one for one in target.attachments if one.name != SEQUENCE]
            mine = found[number % self.tasks]
            mine += [_renamed(one, len(mine) + at) for at, one in enumerate(rows)] if number >= self.tasks else rows
        if batch is None and not any(found):
            return [self._untouched(task) for task in range(self.tasks)], None
        newest = max(target.output_sequence for target in self.targets.values())
        note = Attachment(SEQUENCE, inline=str(newest).encode())
        return [(*some, note) for some in found], batch

    def _untouched(self, task: int) -> tuple[Attachment, ...]:
        """The attachment that says that nothing was committed since the first publish of the job; else none."""
        newest = max(self.targets[task_name(source)].output_sequence for source in self.sources(task))
        return (Attachment(SEQUENCE, inline=b"%d" % FIRST),) if newest == FIRST else ()


def _renamed(attachment: Attachment, number: int) -> Attachment:
    """An attachment of another task, under a name that this task does not use: ``output-0`` → ``output-3``."""
    name = attachment.name.rpartition("-")[0] or attachment.name
    return Attachment(f"{name}-{number}", attachment.inline, attachment.blob)


def plan_rescale(
    config: JobConfig, records: Mapping[str, CheckpointRecord], tasks: int, checkpoint_id: str | None
) -> RescalePlan:
    """Plan a rescale to ``tasks`` tasks.

    Args:
        records: the newest record of every task in the current layout.
        checkpoint_id: a checkpoint that all tasks retain; None for the current ones.

    Raises: MissingState if a task has no checkpoint, or does not retain the one that is asked for; ConfigError if the
        configuration does not suit; InvalidError.
    """
    if not records:
        raise MissingState(
            "the job has no checkpoint",
            hint="check job.name, job.id and task.checkpoint.topic; a new job needs no rescale: set job.tasks",
            job=config.job_name,
        )
    layout = next(iter(records.values())).layout
    if not layout.tasks:
        raise MissingState(
            "the job has no checkpoint of a known layout",
            hint="let every task commit once, stop the job, and run this again",
            job=config.job_name,
        )
    names = [task_name(number) for number in range(layout.tasks)]
    if missing := [name for name in names if name not in records]:
        raise MissingState(
            f"there is no checkpoint of {', '.join(missing)}",
            hint="let every task commit once, and run this again. If the partitions of a task never had a message, "
            "send one there; or stop the job, open the task with StateManager.open_task, and commit the offsets at "
            "which they begin",
            job=config.job_name,
        )
    if layout.tasks == tasks:
        raise InvalidError(f"the job has {tasks} tasks already", job=config.job_name)
    if 1 in config.write_versions or any(record.from_version_one for record in records.values()):
        raise ConfigError(
            "version 1 records do not know layouts",
            hint="set task.checkpoint.write.versions = [2], and commit once with every task",
            key="task.checkpoint.write.versions",
        )
    targets = (
        {name: records[name].current for name in names}
        if checkpoint_id is None
        else find_targets(records, names, [checkpoint_id], option=None)
    )
    plan = RescalePlan(
        JobConfig.from_mapping(config.to_mapping(), {"job.tasks": layout.tasks}), records, targets, tasks
    )
    if not plan.stores:
        raise ConfigError(
            "the job has no store that is backed up: there is nothing to give to other tasks",
            hint="start a job with another job.id and the new job.tasks; it reads its input from the beginning",
            job=config.job_name,
        )
    common_serdes(targets.values())  # the new tasks share their labels
    for name, target in targets.items():
        check_sources(target, records[name].current.batch, name)
        if set(target.stores) != set(plan.stores):
            raise ConfigError(
                f"checkpoint {target.checkpoint_id} has the stores {', '.join(sorted(target.stores)) or '(none)'}, but "
                f"the configuration backs up {', '.join(plan.stores) or '(none)'}",
                hint="configure the stores of that checkpoint, and run this again",
                task=name,
            )
        # with other attachments than output and a processor's, keys have an unknown form
        foreign = [one.name for one in target.attachments if one.name not in (SEQUENCE, RECORD) and not one.is_output]
        if foreign:
            raise InvalidError(
                f"checkpoint {target.checkpoint_id} has the attachment {foreign[0]!r}: the keys of its stores are an "
                "engine's own, and the tasks that they belong to cannot be computed",
                hint="start a job of another name with the new job.tasks, and read the input again",
                task=name,
            )
    return plan
