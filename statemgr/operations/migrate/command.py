"""``statemgr migrate``: moves a job to another backend, one stage at a time, and back."""

from __future__ import annotations

import click

from statemgr.operations.migrate.status import status_command
from statemgr.operations.migrate.steps import advance_command, plan_command, rollback_command
from statemgr.operations.migrate.verify_command import verify_command


@click.group("migrate")
def command() -> None:
    """Move the job to another backend, one stage at a time, and back."""


for _command in (status_command, plan_command, verify_command, advance_command, rollback_command):
    command.add_command(_command)
