"""Options that commands share. Loads the configuration file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from statemgr.config import JobConfig
from statemgr.errors import InvalidError
from statemgr.ids import CheckpointId, task_index, task_name

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_FILE = "job.toml"


def _task(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """A callback: ``Partition 3``, or ``3`` for short; also many of them."""
    if value is None or isinstance(value, tuple):
        return value and tuple(_task(ctx, param, item) for item in value)
    try:
        return task_name(task_index(f"Partition {value.lstrip('0') or 0}" if value.isdecimal() else value))
    except InvalidError as error:
        raise click.BadParameter(f"{error.message}; {error.hint}", ctx, param) from None


def _checkpoint_id(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A callback: the text of a checkpoint ID."""
    try:
        return None if value is None else str(CheckpointId.parse(value))
    except InvalidError as error:
        raise click.BadParameter(f"{error.message}; {error.hint}", ctx, param) from None


def with_config(function: F) -> F:
    """Add ``--config`` and ``--set``, and call with ``config``, the :class:`JobConfig` that they give."""

    @click.option(
        "--config",
        "-c",
        "config_file",
        default=DEFAULT_FILE,
        show_default=True,
        type=click.Path(),
        help="Configuration file of the job.",
    )
    @click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a key for this run. Repeatable.")
    @functools.wraps(function)
    def wrapper(*args: Any, config_file: str, settings: tuple[str, ...], **kwargs: Any) -> Any:
        return function(*args, config=load(config_file, settings), **kwargs)

    return wrapper  # type: ignore[return-value]


def load(config_file: str, settings: tuple[str, ...]) -> JobConfig:
    """The configuration from a file and ``KEY=VALUE`` texts. Raises: ConfigError, click.UsageError."""
    return JobConfig.from_file(config_file, overrides(settings))


def overrides(settings: tuple[str, ...]) -> dict[str, object]:
    """``KEY=VALUE`` texts as a mapping. Raises: click.UsageError."""
    found: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            # The text itself is not repeated: it may hold a secret.
            raise click.UsageError("--set needs KEY=VALUE")
        found[key.strip()] = value
    return found


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
task_option = click.option("--task", callback=_task, metavar="TASK", help="'Partition N', or just N.")
tasks_option = click.option(
    "--task",
    "tasks",
    callback=_task,
    metavar="TASK",
    multiple=True,
    help="'Partition N', or just N. Repeatable; default: all tasks.",
)
checkpoint_option = click.option(
    "--checkpoint",
    "checkpoint_id",
    callback=_checkpoint_id,
    metavar="ID",
    help="A retained checkpoint. Default: the current one.",
)
