"""``statemgr topics``: the checkpoint topic and the changelogs."""

from __future__ import annotations

import click

from statemgr.cli.options import json_option, with_config
from statemgr.cli.output import print_json, print_table
from statemgr.config import JobConfig


@click.group("topics")
def command() -> None:
    """Create or check the job's topics."""


@command.command("create")
@with_config
@json_option
@click.option(
    "--allow-empty-start",
    is_flag=True,
    help="Create the checkpoint topic although the job had state: knowingly start empty.",
)
def create_command(config: JobConfig, as_json: bool, allow_empty_start: bool) -> None:
    """Create the topics that are missing, and check the others."""
    from statemgr.flows.first_start import refuse_lost_job
    from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
    from statemgr.runtime import Runtime

    specs = [checkpoint_topic_spec(config), *changelog_topic_specs(config)]
    with TopicAdmin(config) as admin:
        if not allow_empty_start and not admin.exists(config.checkpoint_topic):
            runtime = Runtime(config)
            try:
                refuse_lost_job(runtime.parts)
            finally:
                runtime.close()
        created = admin.create_missing(specs)
        admin.verify([spec for spec in specs if spec.name not in created])
    if as_json:
        print_json({"created": created, "topics": [spec.name for spec in specs]})
        return
    print_table(
        ("topic", "partitions", ""),
        [(s.name, s.partitions, "created" if s.name in created else "was there") for s in specs],
        empty="no topics",
    )


@command.command("check")
@with_config
@json_option
def check_command(config: JobConfig, as_json: bool) -> None:
    """Check that every topic is there with the right settings; exit status 1 if not."""
    from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec

    specs = [checkpoint_topic_spec(config), *changelog_topic_specs(config)]
    with TopicAdmin(config) as admin:
        problems = admin.check(specs)
    if as_json:
        print_json([{"topic": p.topic, "problem": p.message, "fix": p.fix_command} for p in problems])
    elif problems:
        print_table(("topic", "problem", "fix"), [(p.topic, p.message, p.fix_command) for p in problems], empty="")
    else:
        click.echo(f"ok: {', '.join(spec.name for spec in specs)}")
    if problems:
        raise SystemExit(1)
