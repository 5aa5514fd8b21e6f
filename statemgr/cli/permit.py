"""``statemgr permit``: one-shot permissions for the next opening, which wait for it on the checkpoint topic."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import click

from statemgr.cli.options import json_option, tasks_option, with_config
from statemgr.cli.output import print_json, print_table
from statemgr.config import JobConfig
from statemgr.ids import task_name
from statemgr.model.permissions import PERMISSIONS, Permissions, Permit

_HELP = {
    "allow_empty_start": "Start empty, although there are signs of earlier state.",
    "allow_new_stores": "Start stores that the checkpoint does not list, empty.",
    "allow_removed_stores": "Remove stores that the checkpoint lists.",
    "allow_skipped_input": "Continue, although input was lost or its topic was created again.",
    "allow_serde_change": "Continue with serdes other than the checkpoint's.",
    "overwrite_changelog": "Delete the records of a changelog that this job did not write.",
}


def _flags(function: Callable[..., None]) -> Callable[..., None]:
    for name in reversed(PERMISSIONS):
        function = click.option(f"--{name.replace('_', '-')}", name, is_flag=True, help=_HELP[name])(function)
    return function


@click.command("permit")
@with_config
@json_option
@tasks_option
@click.option("--list", "only_list", is_flag=True, help="Show the permissions that are waiting, and give none.")
@click.option("--revoke", is_flag=True, help="Revoke the permissions that are waiting.")
@_flags
def command(
    config: JobConfig, as_json: bool, tasks: tuple[str, ...], only_list: bool, revoke: bool, **flags: bool
) -> None:
    """Give the next opening of tasks a permission that it uses up. A running owner is not disturbed."""
    from statemgr.kafka.permits import PermitTopic
    from statemgr.local.clock import SystemClock, system_ids

    given = Permissions(**flags)
    if bool(given.names) + only_list + revoke != 1:
        raise click.UsageError("name the permissions to give, or use --list or --revoke")
    names = tasks or tuple(task_name(index) for index in range(config.tasks))
    topic = PermitTopic(config, SystemClock(), system_ids())
    try:
        if given.names:
            shown = topic.give(names, given)
        else:
            shown = topic.waiting(names)
            if revoke:
                topic.revoke(shown)
    finally:
        topic.close()
    if as_json:
        print_json([_fields(permit) for permit in shown])
        return
    print_table(
        ("task", "permission", "given"),
        [(p.task, ", ".join(p.permissions.names), _fields(p)["given"]) for p in shown],
        empty="no permissions are waiting",
    )
    if revoke and shown:
        click.echo("revoked")


def _fields(permit: Permit) -> dict[str, object]:
    given = datetime.fromtimestamp(permit.given_ms / 1000, UTC).isoformat(timespec="seconds")
    return {"task": permit.task, "permissions": list(permit.permissions.names), "given": given}
