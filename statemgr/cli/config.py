"""``statemgr config``: shows and checks the configuration. Contacts nothing."""

from __future__ import annotations

import click

from statemgr.cli.options import json_option, with_config
from statemgr.cli.output import print_json, print_table
from statemgr.config import JobConfig
from statemgr.config.secrets import masked
from statemgr.config.table import KEYS
from statemgr.errors import ConfigError


@click.group("config")
def command() -> None:
    """Show or check the configuration."""


@command.command("show")
@with_config
@json_option
@click.option("--all", "everything", is_flag=True, help="Include keys that are not set, with their defaults.")
def show_command(config: JobConfig, as_json: bool, everything: bool) -> None:
    """Show the configuration, with secrets masked."""
    given = config.masked()
    shown = {**(_defaults(config) if everything else {}), **given}
    if as_json:
        print_json(dict(sorted(shown.items())))
        return
    rows = [(key, _text(value), "" if key in given else "default") for key, value in sorted(shown.items())]
    print_table(("key", "value", ""), rows, empty="nothing is set")


@command.command("check")
@with_config
@json_option
def check_command(config: JobConfig, as_json: bool) -> None:
    """Check the configuration and resolve its references; exit status 2 if something is wrong."""
    if "kafka.bootstrap.servers" not in config.values:
        raise ConfigError(
            "kafka.bootstrap.servers is not set",
            hint='for example kafka.bootstrap.servers = "localhost:9092"',
            key="kafka.bootstrap.servers",
        )
    for kind in ("producer", "consumer", "admin"):
        config.kafka_client(kind)
    # Asked for because that resolves them.
    assert config.blob_uri is None or config.blob_s3 is not None
    assert config.state_dir is not None
    notes = _notes(config)
    if as_json:
        print_json({"job": config.job_name, "tasks": config.tasks, "stores": list(config.stores), "notes": notes})
        return
    click.echo(f"ok: job {config.job_name}-{config.job_id}, {config.tasks} tasks, stores: {_stores(config)}")
    for note in notes:
        click.echo(f"note: {note}")


def _notes(config: JobConfig) -> list[str]:
    """What is allowed, but perhaps not meant."""
    notes = [] if config.stores else ["the job has no store; declare one with a line such as [stores.totals]"]
    for store in config.stores.values():
        if not store.durable:
            notes.append(f"store {store.name} is not backed up: it is empty again when the machine is lost")
        for factory in store.restore_factories:
            if factory not in store.backup_factories:
                notes.append(
                    f"store {store.name} may be restored from {factory}, but is not backed up there: "
                    "keep this only during a migration"
                )
    return notes


def _stores(config: JobConfig) -> str:
    return (
        ", ".join(f"{s.name} → {' + '.join(s.backup_factories) or 'nowhere'}" for s in config.stores.values()) or "none"
    )


def _defaults(config: JobConfig) -> dict[str, object]:
    """Every key that can be named, with what is in force for it."""
    shown: dict[str, object] = {}
    for entry in KEYS:
        if entry.pattern.endswith("*"):
            continue
        names = list(config.stores) if "<name>" in entry.pattern else [""]
        for name in names:
            key = entry.pattern.replace("<name>", name)
            shown[key] = masked(key, config.get(key)) if config.get(key) is not None else None
    return shown


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
