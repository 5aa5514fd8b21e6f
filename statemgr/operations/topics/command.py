"""``statemgr topics``: creates, checks and repairs the checkpoint topic and the changelogs."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from statemgr.errors import MissingState, PermissionNeeded, StatemgrError
from statemgr.terminal.options import Call, job_options
from statemgr.terminal.output import say

if TYPE_CHECKING:
    from statemgr.config import JobConfig
    from statemgr.kafka.topics import TopicAdmin, TopicProblem


@click.group("topics")
def command() -> None:
    """Create, check or repair the topics of the job."""


@command.command("create")
@job_options()
@click.option(
    "--allow-empty-start",
    is_flag=True,
    help="Create the checkpoint topic and start empty, although the job had state.",
)
@click.option(
    "--recreate-empty",
    is_flag=True,
    help="Create changelogs again that have another number of partitions, if nothing was ever written to them and the "
    "job has no checkpoint.",
)
@click.option(
    "--all",
    "create_all",
    is_flag=True,
    help="Also create the topics of task.inputs and task.outputs that are missing, with one partition for each task.",
)
def create_command(call: Call, allow_empty_start: bool, recreate_empty: bool, create_all: bool) -> None:
    """Create the topics of the job that are missing, and check the others.

    Looks at the input topics (task.inputs) first: each that exists must have one partition for each task. Topics of
    task.outputs are created with --all only, because they may need another number of partitions. They must exist.
    """
    from statemgr.flows.opening.opening_checks import refuse_lost_job
    from statemgr.health.checks import missing_outputs
    from statemgr.kafka.input_topics import missing_topics
    from statemgr.kafka.topics import TopicAdmin, TopicSpec, changelog_topic_specs, checkpoint_topic_spec
    from statemgr.local.machine import SystemClock
    from statemgr.wiring import open_services

    config = call.config
    changelogs = changelog_topic_specs(config)
    specs = [checkpoint_topic_spec(config), *changelogs]
    streams = dict.fromkeys([*config.inputs, *config.outputs]) if create_all else {}
    with TopicAdmin(config, SystemClock()) as admin:
        for error in _input_errors(config, admin):
            if not isinstance(error, MissingState):  # somebody else creates the topic later
                raise error
        if not allow_empty_start and not admin.exists(config.checkpoint_topic):
            with closing(open_services(config)) as services:
                refuse_lost_job(services)
        if recreate_empty:
            _refuse_state(config, admin)
            admin.delete_unused(changelogs)
        replicas = config.checkpoint_replication_factor
        others = [TopicSpec(topic, config.tasks, replicas, {}, created_with=config.topic_settings) for topic in streams]
        created = admin.create_missing([*specs, *others])
        admin.verify([spec for spec in specs if spec.name not in created])
        missing = missing_outputs(config, admin)
        specs += [spec for spec in others if spec.name in created]
    call.show(
        {"created": created, "topics": [spec.name for spec in specs]},
        ("topic", "partitions", ""),
        [(s.name, s.partitions, "created" if s.name in created else "existed") for s in specs],
        empty="no topics",
    )
    if missing:
        raise missing_topics(config, [], [str(error.where["topic"]) for error in missing])


@command.command("check", short_help="Check the topics and their settings.")
@job_options()
def check_command(call: Call) -> None:
    """Check that every topic exists and has the right settings; exit status 1 if not.

    Input topics (task.inputs) must exist, with one partition for each task. Output topics (task.outputs) must exist.
    """
    from statemgr.health.checks import missing_outputs
    from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
    from statemgr.local.machine import SystemClock

    specs = [checkpoint_topic_spec(call.config), *changelog_topic_specs(call.config)]
    with TopicAdmin(call.config, SystemClock()) as admin:
        problems = admin.check(specs)
        alone = admin.only_copy(specs[0])
        errors = [*_input_errors(call.config, admin), *missing_outputs(call.config, admin)]
        problems += [_problem(error) for error in errors]
    if problems or call.as_json:
        call.show(
            [{"topic": p.topic, "problem": p.message, "fix": p.fix_command} for p in problems],
            ("topic", "problem", "fix"),
            [(p.topic, p.message, p.fix_command) for p in problems],
            empty="",
        )
    else:
        topics = [*(spec.name for spec in specs), *call.config.inputs, *call.config.outputs]
        click.echo(f"ok: {', '.join(dict.fromkeys(topics))}")
    if alone is not None:
        say(f"note: {alone.topic}: {alone.message}. Fix: {alone.fix_command}")
    if problems:
        raise SystemExit(1)


def _refuse_state(config: JobConfig, admin: TopicAdmin) -> None:
    """Raises: PermissionNeeded if the job has a checkpoint."""
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.local.machine import SystemClock

    if admin.exists(config.checkpoint_topic):
        with closing(CheckpointTopic(config, SystemClock())) as log:
            if log.read():
                raise PermissionNeeded(
                    "the job has checkpoints: its changelogs stay as they are",
                    hint="use `statemgr rescale --tasks` to change the number of tasks",
                    job=config.job_name,
                )


def _input_errors(config: JobConfig, admin: TopicAdmin) -> list[StatemgrError]:
    """What is wrong with the input topics. Only their number of partitions makes this read the checkpoint topic.

    Raises: UnavailableError, AccessDenied, CorruptRecord.
    """
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.kafka.input_topics import topic_problem
    from statemgr.local.machine import SystemClock
    from statemgr.model.keys.partitioners import is_by_input

    found = admin.describe(config.inputs) if config.inputs else {}
    counts = {topic: len(found[topic].partitions) if topic in found else None for topic in config.inputs}
    published = None
    if any(count not in (None, config.tasks) for count in counts.values()) and admin.exists(config.checkpoint_topic):
        with closing(CheckpointTopic(config, SystemClock())) as log:
            layouts = [record.layout for record in log.read().values() if record.layout.tasks]
        if not all(is_by_input(layout.partitioner) for layout in layouts):
            # the job spreads keys itself, so that its input may have any number of partitions
            counts = {topic: None if count is None else config.tasks for topic, count in counts.items()}
        else:
            published = max((layout.tasks for layout in layouts), default=None)
    errors = (topic_problem(config, topic, count, published) for topic, count in counts.items())
    return [error for error in errors if error is not None]


def _problem(error: StatemgrError) -> TopicProblem:
    from statemgr.kafka.topics import TopicProblem

    return TopicProblem(str(error.where["topic"]), error.message, error.hint or "")


@command.command("repair", short_help="Copy the valid checkpoint records to a new topic.")
@job_options()
@click.option("--to", "target", metavar="TOPIC", help="The new topic.  [default: <checkpoint topic>-repaired]")
@click.option("--write", is_flag=True, help="Fence the job and copy. Without it, only list what would be left out.")
@click.option(
    "--allow-older-checkpoints",
    "allow_older",
    is_flag=True,
    help="With --write: also leave out the newest records of tasks, which then go back to older checkpoints.",
)
def repair_command(call: Call, target: str | None, write: bool, allow_older: bool) -> None:
    """List the records of the checkpoint topic that are not valid; with --write, copy all others to a new topic.

    The copy fences every owner of the job. Afterwards, set task.checkpoint.topic. The list says which tasks go back to
    older checkpoints, because a record that is left out was their newest one.
    """
    from statemgr.flows.owner import fence_ids
    from statemgr.ids import task_name
    from statemgr.kafka.transactions.publisher import job_transactional_id, task_transactional_id
    from statemgr.operations.topics.topic_repair import check_target, copy_valid, look, target_config
    from statemgr.wiring import open_services

    config = call.config
    target = target or f"{config.checkpoint_topic}-repaired"
    new = target_config(config, target)
    with closing(open_services(config)) as services:
        result = look(config, services.clock)
        if write:
            if not allow_older:
                result.refuse_older()  # this and the next check come before the fence
            check_target(new, services.clock)
            # with the configuration of an older layout, owners of later tasks live
            count = max(config.tasks, result.tasks)
            tasks = [task_transactional_id(config, task_name(index)) for index in range(count)]
            fence_ids(services, [job_transactional_id(config), *tasks])
            result = copy_valid(config, services.clock, target, allow_older=allow_older)
    left_out = [asdict(record) for record in result.left_out]
    call.show(
        {"written": write, "to": target, "valid": result.copied, "left_out": left_out},
        ("offset", "record", "left out because", "then"),
        [(r.offset, r.key, r.why, r.then or "") for r in result.left_out],
        empty="every record is valid",
    )
    if call.as_json:
        return
    if write:
        click.echo(f"{result.copied} records copied; now set task.checkpoint.topic = {target}")
    else:
        click.echo(f"{result.copied} valid records; nothing was changed; add --write to copy them to {target}")
