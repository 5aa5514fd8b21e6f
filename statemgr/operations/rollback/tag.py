"""``statemgr checkpoints tag``: keeps a checkpoint beyond the retention. Fences the job."""

from __future__ import annotations

from contextlib import closing

import click

from statemgr.terminal.options import Call, checkpoint_id_of, job_options
from statemgr.terminal.output import print_json, say


@click.command("tag", short_help="Keep a checkpoint, or release it.")
@job_options()
@click.argument("wanted_id", metavar="ID", callback=checkpoint_id_of)
@click.option("--keep/--drop", "is_kept", default=None, help="Keep the checkpoint, or release it.")
def tag_command(call: Call, wanted_id: str, is_kept: bool | None) -> None:
    """Keep a retained checkpoint until it is released: later commits, their clean-up and gc leave it alone.

    This publishes the current checkpoint once more, so a running owner is fenced: stop the job first, or let it start
    again.
    """
    from statemgr.flows.opening.open_job import JobTopics
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.operations.rollback.owner import keep
    from statemgr.wiring import open_services

    if is_kept is None:
        raise click.UsageError("say what to do with the checkpoint: --keep or --drop")
    with (
        closing(open_services(call.config)) as services,
        closing(CheckpointTopic(call.config, services.clock, owned=True)) as log,
    ):
        kept = keep(services, log, JobTopics(services), wanted_id, is_kept=is_kept)
    if call.as_json:
        print_json([{"task": task, "kept": list(of_task)} for task, of_task in sorted(kept.items())])
        return
    for task, of_task in sorted(kept.items()):
        say(f"{task} keeps {', '.join(of_task) or 'no checkpoint beyond the retention'}")
