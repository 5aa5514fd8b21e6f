"""``statemgr dev``: runs a real one-node Kafka broker and an S3 server on this machine, without Docker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from statemgr_tools.dev import DevServers, servers

_directory = click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=servers.DEFAULT_DIRECTORY,
    show_default=True,
    help="Directory for the servers' data, logs and PIDs.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group("dev")
def command() -> None:
    """Run a real one-node Kafka broker and an S3 server on this machine, without Docker."""


@command.command("up")
@_directory
@_json
@click.option("--kafka/--no-kafka", default=True, show_default=True, help="Start a Kafka broker.")
@click.option("--s3/--no-s3", default=True, show_default=True, help="Start an S3 server.")
def up_command(directory: Path, as_json: bool, kafka: bool, s3: bool) -> None:
    """Start the servers. They keep running until `statemgr dev down`."""
    console = Console(stderr=True)
    with console.status("starting") as progress:
        running = servers.up(directory, kafka=kafka, s3=s3, report=progress.update)
    _show(running, as_json)


@command.command("down")
@_directory
@_json
def down_command(directory: Path, as_json: bool) -> None:
    """Stop the servers. Their data stays."""
    stopped = servers.down(directory)
    if as_json:
        click.echo(json.dumps({"stopped": stopped}))
    else:
        click.echo("stopped" if stopped else "nothing was running")


@command.command("status")
@_directory
@_json
def status_command(directory: Path, as_json: bool) -> None:
    """Show the servers that run; exit status 1 if none does."""
    running = servers.status(directory)
    _show(running, as_json)
    if running.kafka_pid is None and running.s3_pid is None:
        raise SystemExit(1)


def _show(running: DevServers, as_json: bool) -> None:
    fields: dict[str, Any] = running.to_dict()
    if as_json:
        click.echo(json.dumps(fields))
        return
    if running.kafka_pid is None and running.s3_pid is None:
        click.echo("nothing is running; start with: statemgr dev up")
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in fields.items():
        if value is not None:
            table.add_row(name.replace("_", " "), str(value))
    # a wide console, because an address on two lines cannot be copied
    Console(soft_wrap=True, width=200).print(table)
