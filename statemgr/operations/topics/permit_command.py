"""``statemgr permit``: writes one-shot permissions to the checkpoint topic, where the next opening uses them up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from statemgr.ids import task_name
from statemgr.terminal.options import Call, job_options

if TYPE_CHECKING:
    from statemgr.model.jobs.permissions import Permit

#: One for each permission, in their order.
_HELP = {
    "allow_empty_start": "Start empty, although there are signs of earlier state.",
    "allow_new_stores": "Start stores that the checkpoint does not list, empty.",
    "allow_removed_stores": "Remove stores that the checkpoint lists.",
    "allow_skipped_input": "Continue, although input was lost, or its topic was created again or is not read any more.",
    "allow_skipped_output": "On Spark: continue, although the rows of the last batch are lost.",
    "allow_serde_change": "Continue with serdes other than the checkpoint's.",
    "overwrite_changelog": "Delete the records of a changelog that this job did not write.",
    "allow_repeated_input": "Begin where the old job was adopted, although it has gone on since.",
}


def _flags(function: Callable[..., None]) -> Callable[..., None]:
    for name, text in reversed(_HELP.items()):
        function = click.option(f"--{name.replace('_', '-')}", name, is_flag=True, help=text)(function)
    return function


@click.command("permit")
@job_options("tasks")
@click.option("--list", "only_list", is_flag=True, help="Show the permissions that are waiting, and give none.")
@click.option("--revoke", is_flag=True, help="Revoke the permissions that are waiting.")
@_flags
def command(call: Call, only_list: bool, revoke: bool, **flags: bool) -> None:
    """Give the next opening of tasks a permission that it uses up. A running owner is not disturbed."""
    from statemgr.local.machine import SystemClock, system_ids
    from statemgr.model.jobs.permissions import Permissions
    from statemgr.operations.topics.permits import PermitTopic

    given = Permissions(**flags)
    if bool(given.names) + only_list + revoke != 1:
        raise click.UsageError("name the permissions to give, or use --list or --revoke")
    with closing(PermitTopic(call.config, SystemClock(), system_ids())) as topic:
        shown = [] if given.names else topic.waiting(call.tasks)
        for task in call.tasks:
            if task not in {permit.task for permit in shown}:  # job.tasks may be lower than when it was given
                call.config.check_task(task)
        if given.names:
            shown = topic.give(call.tasks or tuple(map(task_name, range(call.config.tasks))), given)
        elif revoke:
            topic.revoke(shown)
    call.show(
        [_fields(permit) for permit in shown],
        ("task", "permission", "given"),
        [(p.task, ", ".join(p.names), _fields(p)["given"]) for p in shown],
        empty="no permissions are waiting",
    )
    if revoke and shown and not call.as_json:
        click.echo("revoked")


def _fields(permit: Permit) -> dict[str, object]:
    given = datetime.fromtimestamp(permit.given_ms / 1000, UTC).isoformat(timespec="seconds")
    return {"task": permit.task, "permissions": list(permit.names), "given": given}
