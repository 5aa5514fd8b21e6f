"""``statemgr topics``: the checkpoint topic and the changelogs."""

from __future__ import annotations

import click

from statemgr.cli.options import json_option, with_config
from statemgr.cli.output import print_json, print_table
from statemgr.config import JobConfig


@click.group("topics")
def command() -> None:
    """Create, check or repair the topics of the job."""


@command.command("create")
@with_config
@json_option
@click.option(
    "--allow-empty-start",
    is_flag=True,
    help="Create the checkpoint topic and start empty, although the job had state.",
)
def create_command(config: JobConfig, as_json: bool, allow_empty_start: bool) -> None:
    """Create the topics that are missing, and check the others."""
    from statemgr.flows.empty_start import refuse_lost_job
    from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
    from statemgr.local.clock import SystemClock
    from statemgr.wiring import open_services

    specs = [checkpoint_topic_spec(config), *changelog_topic_specs(config)]
    with TopicAdmin(config, SystemClock()) as admin:
        if not allow_empty_start and not admin.exists(config.checkpoint_topic):
            services = open_services(config)
            try:
                refuse_lost_job(services)
            finally:
                services.close()
        created = admin.create_missing(specs)
        admin.verify([spec for spec in specs if spec.name not in created])
    if as_json:
        print_json({"created": created, "topics": [spec.name for spec in specs]})
        return
    print_table(
        ("topic", "partitions", ""),
        [(s.name, s.partitions, "created" if s.name in created else "existed") for s in specs],
        empty="no topics",
    )


@command.command("check")
@with_config
@json_option
def check_command(config: JobConfig, as_json: bool) -> None:
    """Check that every topic exists and has the right settings; exit status 1 if not."""
    from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
    from statemgr.local.clock import SystemClock

    specs = [checkpoint_topic_spec(config), *changelog_topic_specs(config)]
    with TopicAdmin(config, SystemClock()) as admin:
        problems = admin.check(specs)
    if as_json:
        print_json([{"topic": p.topic, "problem": p.message, "fix": p.fix_command} for p in problems])
    elif problems:
        print_table(("topic", "problem", "fix"), [(p.topic, p.message, p.fix_command) for p in problems], empty="")
    else:
        click.echo(f"ok: {', '.join(spec.name for spec in specs)}")
    if problems:
        raise SystemExit(1)


@command.command("repair")
@with_config
@json_option
@click.option("--to", "target", metavar="TOPIC", help="The new topic.  [default: <checkpoint topic>-repaired]")
@click.option("--dry-run", is_flag=True, help="List what would be left out, and copy nothing.")
def repair_command(config: JobConfig, as_json: bool, target: str | None, dry_run: bool) -> None:
    """Copy the valid records of the checkpoint topic to a new topic, and list what is left out.

    Run it with --dry-run first. The copy fences every owner of the job. Afterwards, set task.checkpoint.topic.
    """
    from statemgr.flows.open_job import fence_ids
    from statemgr.ids import task_name
    from statemgr.kafka.publisher import job_transactional_id, task_transactional_id
    from statemgr.kafka.topic_repair import copy_valid, look
    from statemgr.wiring import open_services

    target = target or f"{config.checkpoint_topic}-repaired"
    services = open_services(config)
    try:
        if dry_run:
            result = look(config, services.clock)
        else:
            tasks = [task_transactional_id(config, task_name(index)) for index in range(config.tasks)]
            fence_ids(services, [job_transactional_id(config), *tasks])
            result = copy_valid(config, services.clock, target)
    finally:
        services.close()
    if as_json:
        left_out = [{"offset": r.offset, "key": r.key, "why": r.why} for r in result.left_out]
        print_json({"to": None if dry_run else target, "valid": result.copied, "left_out": left_out})
        return
    print_table(
        ("offset", "key", "left out because"),
        [(r.offset, r.key, r.why) for r in result.left_out],
        empty="every record is valid",
    )
    if dry_run:
        click.echo(f"{result.copied} valid records; nothing was changed")
    else:
        click.echo(f"{result.copied} records copied; now set task.checkpoint.topic = {target}")
