"""``statemgr dev``: runs a real one-node Kafka broker and an S3 server on this machine, without Docker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from statemgr_tools.dev import DevServers

_PORT = click.IntRange(0, 65535)
#: The usual ports, which are also in the configuration and the docker-compose.yml of `statemgr init --example`.
KAFKA_PORT = 9092
S3_PORT = 7070
#: The directory of ``dev up``'s servers, relative to the working directory.
DEFAULT_DIRECTORY = Path(".statemgr", "dev")

_directory = click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_DIRECTORY,
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
@click.option(
    "--kafka-port",
    type=_PORT,
    metavar="PORT",
    help="Port of the broker, or 0 for any.  [default: the last one, or 9092]",
)
@click.option(
    "--s3-port",
    type=_PORT,
    metavar="PORT",
    help="Port of the S3 server, or 0 for any.  [default: the last one, or 7070]",
)
@click.option("--write", is_flag=True, help="Write the addresses of the servers into job.toml.")
def up_command(
    directory: Path, as_json: bool, kafka: bool, s3: bool, kafka_port: int | None, s3_port: int | None, write: bool
) -> None:
    """Start the servers. They keep running until `statemgr dev down`. If job.toml does not name them, say so.

    The broker needs Java 17. The first start fetches its jars with Maven, or with the Ivy of PySpark; set KAFKA_HOME to
    use an installed Kafka instead.
    """
    from statemgr.terminal.output import say
    from statemgr_tools.dev import servers

    known = servers.read_state(directory.absolute())
    if kafka_port is None:
        kafka_port = known["kafka"].port if "kafka" in known else KAFKA_PORT
    if s3_port is None:
        s3_port = known["s3"].port if "s3" in known else S3_PORT
    with _progress() as report:
        running = servers.up(
            directory, kafka=kafka, s3=s3, kafka_port=kafka_port or None, s3_port=s3_port or None, report=report
        )
    _show(running, as_json)
    if running.s3_server == "moto":
        say("note: this S3 server, moto, keeps objects in memory, and loses them when it stops: install Go, or put "
            "versitygw on PATH, and use another --directory")  # fmt: skip
    _compare_configuration(running, write=write)


def _compare_configuration(running: DevServers, *, write: bool) -> None:
    """Say which lines of job.toml name other servers or none, or write them. Raises: ConfigError, DiskFull,
    AccessDenied."""
    from statemgr.config import JobConfig
    from statemgr.errors import ConfigError
    from statemgr.terminal.options import DEFAULT_FILE
    from statemgr.terminal.output import say
    from statemgr.terminal.toml_edit import TomlEdit, line_of

    path = Path(DEFAULT_FILE)
    if not path.exists() and not write:
        return
    try:
        found = JobConfig.from_file(path).to_mapping()
    except ConfigError:
        if write:
            raise
        return  # the first command that needs it says what is wrong
    addresses = {"kafka.bootstrap.servers": running.bootstrap_servers}
    if "blob.store.s3.endpoint" in found or str(found.get("blob.store.uri")).startswith("s3://"):
        addresses["blob.store.s3.endpoint"] = running.s3_endpoint
    changes = {
        key: address
        for key, address in addresses.items()
        if address and str(found.get(key)).replace("localhost", "127.0.0.1") != address
    }
    if not changes:
        return
    lines = "\n".join(line_of(key, address) for key, address in changes.items())
    if not write:
        say(f"{path} does not name these servers. Add --write to change it, or write these lines into it:\n{lines}")
        return
    saved = TomlEdit(path, changes).write("before-dev-up")
    say(f"changed {path}; the old file is {saved}:\n{lines}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show the current step on standard error: a spinner on a terminal, otherwise one line each."""
    from statemgr.terminal.output import messages

    stderr = messages()
    if not stderr.is_terminal:
        yield lambda step: stderr.print(step, markup=False)
        return
    with stderr.status("") as status:
        yield lambda step: status.update(step)


@command.command("down")
@_directory
@_json
def down_command(directory: Path, as_json: bool) -> None:
    """Stop the servers. Their data stays, except the objects of moto, an S3 server in memory."""
    from statemgr_tools.dev import servers

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
    from statemgr_tools.dev import servers

    running = servers.status(directory)
    _show(running, as_json)
    if running.kafka_pid is None and running.s3_pid is None:
        raise SystemExit(1)


def _show(running: DevServers, as_json: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

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
            table.add_row(name.replace("_", " "), escape(str(value)))
    # a wide console, because an address on two lines cannot be copied
    Console(soft_wrap=True, width=200).print(table)
