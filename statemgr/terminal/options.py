"""What the commands share: the options for configuration, tasks, checkpoint and JSON, and how a result is shown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING, Any

import click

from statemgr.config import JobConfig
from statemgr.config.units import UNITS, duration_ms
from statemgr.errors import InvalidError
from statemgr.ids import CheckpointId, task_index, task_name
from statemgr.terminal.output import print_json, print_table, progress_bars

if TYPE_CHECKING:
    from statemgr.ports import Progress
    from statemgr.reader import JobReader

DEFAULT_FILE = "job.toml"


@dataclass(frozen=True, kw_only=True)
class Call:
    """The shared options of one command. Those that a command does not have keep their defaults."""

    config: JobConfig
    as_json: bool
    tasks: tuple[str, ...] = ()
    checkpoint_id: str | None = None

    def reader(self) -> JobReader:
        """Read the published state of the job. The caller closes the reader."""
        from statemgr.reader import JobReader

        return JobReader(self.config)

    def progress(self) -> AbstractContextManager[Progress]:
        """Show progress bars for people while the block runs. The block must not print."""
        return progress_bars(quiet=self.as_json)

    def show(self, found: Any, headers: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
        """Print ``found`` for ``--json``, or ``rows`` as a table. ``empty`` replaces a table without rows."""
        if self.as_json:
            print_json(found)
        else:
            print_table(headers, rows, empty=empty)


def _addresses(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    if any(not address.startswith(("http://", "https://")) for address in value):
        raise click.UsageError("--metrics needs an address that begins with http:// or https://", ctx)
    return value


#: The option for what the processes of a job say themselves.
metrics_option = click.option(
    "--metrics",
    multiple=True,
    callback=_addresses,
    metavar="URL",
    help="Address of the metrics of a process of the job, for its health, phases and restores. Repeatable.",
)


def duration(
    unit: str | None = "s", *, least: float = 0, most: float = inf
) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """For an option: accept a duration such as ``90 s`` or ``36h``, and return seconds.

    Args:
        unit: the unit of a plain number; None refuses plain numbers.
        least: the shortest duration, in seconds; ``most``: the longest.
    """

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
        if value is None:
            return None
        try:
            found = float(duration_ms(value, unit) / 1000)
        except ValueError:
            plain = f"or a number of {unit}" if unit else "such as 36h"
            raise click.BadParameter(f"give a number and a unit ({UNITS}), {plain}", ctx, param) from None
        if not least <= found <= most:
            limit = f"less than {least:g} s" if found < least else f"more than {most:g} s"
            raise click.BadParameter(f"{found:g} s is {limit}", ctx, param)
        return found

    return convert


def _task(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Accept ``Partition 3``, or ``3`` for short. Also checks each of several values."""
    if value is None or isinstance(value, tuple):
        return value and tuple(_task(ctx, param, item) for item in value)
    try:
        return task_name(task_index(f"Partition {value.lstrip('0') or 0}" if value.isdecimal() else value))
    except InvalidError as error:
        raise click.BadParameter(f"{error.message}; {error.hint}", ctx, param) from None


def checkpoint_id_of(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Accept the text of a checkpoint ID. Also checks each of several values."""
    if isinstance(value, tuple):
        return tuple(checkpoint_id_of(ctx, param, item) for item in value)
    try:
        return None if value is None else str(CheckpointId.parse(value))
    except InvalidError as error:
        raise click.BadParameter(f"{error.message}; {error.hint}", ctx, param) from None


def time_of(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Accept a time in the form of ISO 8601, in UTC unless it says otherwise, and return epoch milliseconds."""
    if value is None:
        return None
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            "give a time such as 2025-06-30T12:00, in UTC, or with an offset such as +02:00", ctx, param
        ) from None
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
task_option = click.option("--task", callback=_task, metavar="TASK", help="'Partition N', or just N.")
_OPTIONS = {
    "config": click.option(
        "--config",
        "-c",
        "config_file",
        default=DEFAULT_FILE,
        show_default=True,
        type=click.Path(),
        help="Configuration file of the job.",
    ),
    "set": click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a key for this run. Repeatable."
    ),
    "json": json_option,
    "tasks": click.option(
        "--task",
        "tasks",
        callback=_task,
        metavar="TASK",
        multiple=True,
        help="'Partition N', or just N. Repeatable; default: all tasks.",
    ),
    "checkpoint": click.option(
        "--checkpoint",
        "checkpoint_id",
        callback=checkpoint_id_of,
        metavar="ID",
        help="A retained checkpoint. Default: the current one.",
    ),
}


def job_options(*more: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command ``--config``, ``--set``, ``--json`` and ``more`` (``tasks``, ``checkpoint``).

    The function gets them as its first argument, a :class:`Call`, with the configuration loaded.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*, config_file: str, settings: tuple[str, ...], as_json: bool, **rest: Any) -> Any:
            shared = {name: rest.pop(name) for name in ("tasks", "checkpoint_id") if name in rest}
            config = JobConfig.from_file(config_file, overrides(settings))
            return function(Call(config=config, as_json=as_json, **shared), **rest)

        decorated: Callable[..., Any] = wrapper
        for name in reversed(("config", "set", "json", *more)):
            decorated = _OPTIONS[name](decorated)
        return decorated

    return decorate


def overrides(settings: tuple[str, ...]) -> dict[str, object]:
    """``KEY=VALUE`` texts as a mapping. Raises: click.UsageError."""
    found: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            # do not repeat the text: it may contain a secret
            raise click.UsageError("--set needs KEY=VALUE")
        found[key.strip()] = value
    return found
