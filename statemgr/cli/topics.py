"""``statemgr topics``: creates, checks and repairs the checkpoint topic and the changelogs."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import click

from statemgr.cli.options import Call, job_options

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
def create_command(call: Call, allow_empty_start: bool) -> None:
    """Create the topics that are missing, and check the others."""
    from statemgr.flows.opening_checks import refuse_lost_job
    from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
    from statemgr.local.clock import SystemClock
    from statemgr.wiring import open_services

    config = call.config
    specs = [checkpoint_topic_spec(config), *changelog_topic_specs(config)]
    with TopicAdmin(config, SystemClock()) as admin:
        if not allow_empty_start and not admin.exists(config.checkpoint_topic):
            with closing(open_services(config)) as services:
                refuse_lost_job(services)
        created = admin.create_missing(specs)
        admin.verify([spec for spec in specs if spec.name not in created])
    call.show(
        {"created": created, "topics": [spec.name for spec in specs]},
        ("topic", "partitions", ""),
        [(s.name, s.partitions, "created" if s.name in created else "existed") for s in specs],
        empty="no topics",
    )


@command.command("check", short_help="Check the topics and their settings.")
@job_options()
def check_command(call: Call) -> None:
    """Check that every topic exists and has the right settings; exit status 1 if not.

    Input topics (task.inputs) must exist, with one partition for each task.
    """
    from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
    from statemgr.local.clock import SystemClock

    specs = [checkpoint_topic_spec(call.config), *changelog_topic_specs(call.config)]
    with TopicAdmin(call.config, SystemClock()) as admin:
        problems = [*admin.check(specs), *_input_problems(call.config, admin)]
    if problems or call.as_json:
        call.show(
            [{"topic": p.topic, "problem": p.message, "fix": p.fix_command} for p in problems],
            ("topic", "problem", "fix"),
            [(p.topic, p.message, p.fix_command) for p in problems],
            empty="",
        )
    else:
        click.echo(f"ok: {', '.join([*(spec.name for spec in specs), *call.config.inputs])}")
    if problems:
        raise SystemExit(1)


def _input_problems(config: JobConfig, admin: TopicAdmin) -> list[TopicProblem]:
    """What is wrong with the input topics. Only their number of partitions makes this read the checkpoint topic.

    Raises: UnavailableError, AccessDenied, CorruptRecord.
    """
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.kafka.input_topics import topic_problem
    from statemgr.kafka.topics import TopicProblem
    from statemgr.local.clock import SystemClock
    from statemgr.model.partitioners import BY_INPUT_PARTITION

    found = admin.describe(config.inputs) if config.inputs else {}
    counts = {topic: len(found[topic].partitions) if topic in found else None for topic in config.inputs}
    published = None
    if any(count not in (None, config.tasks) for count in counts.values()) and admin.exists(config.checkpoint_topic):
        with closing(CheckpointTopic(config, SystemClock())) as log:
            layouts = [record.layout for record in log.read().values() if record.layout.tasks]
        if any(layout.partitioner != BY_INPUT_PARTITION for layout in layouts):
            # the job spreads keys itself, so that its input may have any number of partitions
            counts = {topic: None if count is None else config.tasks for topic, count in counts.items()}
        else:
            published = max((layout.tasks for layout in layouts), default=None)
    errors = {topic: topic_problem(config, topic, count, published) for topic, count in counts.items()}
    return [TopicProblem(topic, error.message, error.hint or "") for topic, error in errors.items() if error]


@command.command("repair", short_help="Copy the valid checkpoint records to a new topic.")
@job_options()
@click.option("--to", "target", metavar="TOPIC", help="The new topic.  [default: <checkpoint topic>-repaired]")
@click.option("--dry-run", is_flag=True, help="List what would be left out, and copy nothing.")
def repair_command(call: Call, target: str | None, dry_run: bool) -> None:
    """Copy the valid records of the checkpoint topic to a new topic, and list what is left out.

    Run it with --dry-run first. The copy fences every owner of the job. Afterwards, set task.checkpoint.topic.
    """
    from statemgr.flows.open_job import fence_ids
    from statemgr.ids import task_name
    from statemgr.kafka.publisher import job_transactional_id, task_transactional_id
    from statemgr.kafka.topic_repair import copy_valid, look
    from statemgr.wiring import open_services

    config = call.config
    target = target or f"{config.checkpoint_topic}-repaired"
    with closing(open_services(config)) as services:
        if dry_run:
            result = look(config, services.clock)
        else:
            tasks = [task_transactional_id(config, task_name(index)) for index in range(config.tasks)]
            fence_ids(services, [job_transactional_id(config), *tasks])
            result = copy_valid(config, services.clock, target)
    left_out = [{"offset": r.offset, "key": r.key, "why": r.why} for r in result.left_out]
    call.show(
        {"to": None if dry_run else target, "valid": result.copied, "left_out": left_out},
        ("offset", "key", "left out because"),
        [tuple(r.values()) for r in left_out],
        empty="every record is valid",
    )
    if call.as_json:
        return
    if dry_run:
        click.echo(f"{result.copied} valid records; nothing was changed")
    else:
        click.echo(f"{result.copied} records copied; now set task.checkpoint.topic = {target}")
