"""``statemgr checkpoints rollback``: makes a retained checkpoint current again. Only ``--write`` fences and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from statemgr.errors import AccessDenied, RetryableError
from statemgr.terminal.options import Call, checkpoint_id_of, job_options, task_option, time_of
from statemgr.terminal.output import console, moment, print_json, print_table, say

if TYPE_CHECKING:
    from statemgr.flows.rollback import Rollback
    from statemgr.model.checkpoint import Checkpoint

_MEANINGS = {"reference": "no data is copied", "keep": "unchanged since", "fill": "is written again"}


@click.command("rollback", short_help="Make a retained checkpoint current again.")
@job_options()
@click.option(
    "--to",
    "checkpoint_ids",
    callback=checkpoint_id_of,
    metavar="ID",
    multiple=True,
    help="A retained checkpoint. Repeat it where each task has IDs of its own.",
)
@click.option(
    "--before",
    "before_ms",
    callback=time_of,
    metavar="TIME",
    help="The newest checkpoint of each task from before this time, such as 2025-06-30T12:00 (UTC).",
)
@task_option
@click.option("--write", is_flag=True, help="Fence the job and go back. Without it, only print what would happen.")
def rollback_command(
    call: Call, checkpoint_ids: tuple[str, ...], before_ms: int | None, task: str | None, write: bool
) -> None:
    """Make a retained checkpoint current again: for all tasks, or for one (--task) that has its own input.

    The state gets a new record; the checkpoints after it stay retained until later commits drop them. Stop the job
    first. It continues from the input offsets that this command prints.
    """
    from statemgr.flows.input_left import input_of, missing_input
    from statemgr.flows.opening.open_job import JobTopics
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.operations.rollback.owner import Goal, plan, roll_back
    from statemgr.wiring import open_services

    if bool(checkpoint_ids) == (before_ms is not None):
        raise click.UsageError("say where to go back to: --to ID or --before TIME")
    goal = Goal(checkpoint_ids, task, before_ms)
    with (
        closing(open_services(call.config)) as services,
        closing(CheckpointTopic(call.config, services.clock, owned=write)) as log,
    ):
        published: Mapping[str, Checkpoint] = {}
        rollbacks: Sequence[Rollback] = plan(services, log, goal, check_blobs=not write)
        offsets, topic_ids = input_of(one.target for one in rollbacks)
        try:
            problems = missing_input(call.config, services.clock, offsets, topic_ids)
        except (RetryableError, AccessDenied) as error:  # the state comes back all the same
            problems = [f"this could not be checked: {error.message}"]
        if write:
            with call.progress() as progress:
                rollbacks, published = roll_back(services, log, JobTopics(services), goal, progress)
    if call.as_json:
        print_json(
            {
                "written": write,
                "tasks": [_fields(one, published.get(one.record.task)) for one in rollbacks],
                "input_offsets": offsets,
                "input_problems": problems,
            }
        )
        return
    _print(rollbacks, offsets, published)
    for problem in problems:
        say(f"warning: the job may be unable to read its input: {problem}")
    if not write:
        say("nothing was changed; stop the job and add --write to go back")


def _fields(one: Rollback, published: Checkpoint | None) -> dict[str, Any]:
    return {
        "task": one.record.task,
        "current": str(one.record.current.checkpoint_id),
        "to": str(one.target.checkpoint_id),
        "published": None if published is None else str(published.checkpoint_id),
        "input_offsets": dict(one.target.input_offsets),
        "taken_back": [
            {"checkpoint_id": str(c.checkpoint_id), "input_offsets": dict(c.input_offsets)} for c in one.newer
        ],
        "stores": [
            {"store": store, "factory": factory, "way": str(way)} for (factory, store), way in sorted(one.ways.items())
        ],
    }


def _print(rollbacks: Sequence[Rollback], offsets: Mapping[str, int], published: Mapping[str, Checkpoint]) -> None:
    print_table(
        ("task", "current", "back to", "taken", "taken back", "backends"),
        [
            (
                one.record.task,
                one.record.current.checkpoint_id,
                one.target.checkpoint_id,
                moment(one.target.checkpoint_id.millis),
                f"{len(one.newer)} checkpoints",
                "; ".join(f"{f} / {s}: {_MEANINGS[way]}" for (f, s), way in sorted(one.ways.items())),
            )
            for one in rollbacks
        ],
        empty="no tasks",
    )
    out = console()
    out.print("\ninput offsets that the job continues from:", markup=False)
    for source, offset in sorted(offsets.items()):
        out.print(f"{source}  {offset}", markup=False)
    for task, checkpoint in sorted(published.items()):
        out.print(f"{task} is at checkpoint {checkpoint.checkpoint_id} now", markup=False)
