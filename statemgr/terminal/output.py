"""Shows results: tables and progress bars for people, JSON for machines. Writes to the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from statemgr.errors import StatemgrError

# `statemgr --help` loads this module, so the functions that print import what they need
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from statemgr import ports

#: Columns of a table that does not go to a terminal, so that nothing is cut off there.
_WIDE = 400


def console() -> Console:
    """Standard output, for results."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDE)


def messages() -> Console:
    """Standard error, for everything else: progress, notes, errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print one JSON document, on one line if ``indent`` is None. Values that JSON does not have become texts."""
    dumped = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    click.echo("\n".join(map(printable, dumped.split("\n"))))


def printable(dumped: str) -> str:
    """JSON with the same meaning, without what controls a terminal or turns the direction of its text."""
    return dumped if dumped.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in dumped)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Print a table, or ``empty`` if there are no rows. Texts are never interpreted as markup."""
    if not rows:
        say(empty)
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        numeric = all(isinstance(row[len(table.columns)], int | float) for row in rows)
        table.add_column(header, overflow="fold", justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*("" if cell is None else escape(str(cell)) for cell in row))
    console().print(table)


def say(message: str, *, style: str | None = None) -> None:
    """Print a note on standard error, as plain text."""
    messages().print(message, markup=False, style=style)


def show_error(message: str, hint: str | None = None, see: str | None = None) -> None:
    """Print a red line on standard error; below it what to do about it, and where to read more."""
    stderr = messages()
    stderr.print("error:", style="bold red", end=" ")
    stderr.print(message, style="red", markup=False)
    if hint:
        stderr.print(f"hint: {hint}", markup=False)
    if see:
        stderr.print(f"see: {see}", markup=False)


def describe(error: StatemgrError) -> str:
    """The message of an error, and where it happened. (Messages about a key name the key themselves.)"""
    where = ", ".join(f"{name}={value}" for name, value in error.where.items() if name != "key")
    return f"{error.message} [{where}]" if where else error.message


def size(number: int) -> str:
    """A number of bytes with a unit, such as ``1.2 MB``."""
    from rich.filesize import decimal

    return decimal(number)


def moment(millis: int) -> str:
    """Epoch milliseconds as text: UTC, to the millisecond. A time beyond the calendar stays a number."""
    try:
        return datetime.fromtimestamp(millis / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    except (ValueError, OverflowError, OSError):
        return f"{millis} ms"


@contextmanager
def progress_bars(*, quiet: bool) -> Iterator[ports.Progress]:
    """Show a bar for each thing that reports progress, on standard error; none if ``quiet`` or not on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    stderr = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, disable=quiet or not stderr.is_terminal) as bars:
        known: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            amount = f"{done:,} of {total:,}" if total else f"{done:,}"
            if what not in known:
                known[what] = bars.add_task(what, total=total or None, amount=amount)
            bars.update(known[what], completed=done, total=max(total, done) if total else None, amount=amount)

        yield report


def duration(millis: int) -> str:
    """For example ``5 s``, ``3 min``, ``7 h``, ``2 d``."""
    seconds = max(millis, 0) // 1000
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"
