"""Prints the demo's one page of results at the end."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from statemgr_tools.demo.first_answer import FirstAnswer
from statemgr_tools.demo.summary import MigrationSummary, Start, Summary, differences, plain_text
from statemgr_tools.demo.timeline import picture
from statemgr_tools.demo.verify import Side

_DIFFERENCES_SHOWN = 5


def page(summary: Summary, console: Console) -> None:
    """Print the starts, the restores, the totals, and whether all are equal."""
    console.rule(f"statemgr demo · seed {summary.seed} · {summary.rows:,} {summary.word} · blobs: {summary.blob}")
    console.print(starts_table(summary.starts))
    console.print(restores_table(summary.starts))
    if summary.first_answer is not None:
        console.print(first_answer_table(summary.first_answer))
    console.print("Checkpoints, as `statemgr checkpoints list` shows them", style="bold")
    console.print(summary.listing.rstrip(), markup=False, highlight=False, soft_wrap=True)
    _comparison(summary, console)


def migration_page(summary: MigrationSummary, console: Console) -> None:
    """Print the walk as a picture, the totals, and whether all are equal."""
    console.rule(
        f"statemgr demo --migrate · seed {summary.seed} · {summary.rows:,} {summary.word} · {summary.kills} kills"
    )
    console.print(picture(summary.timeline, console.width))
    _comparison(summary, console)


def _comparison(summary: Summary | MigrationSummary, console: Console) -> None:
    # the last side has totals, not changes
    console.print(totals_table(summary.sides[:-1], summary.measures, summary.word))
    verdict(console, summary.sides[0], summary.sides[1:])
    counted = summary.sides[0].total()[1]
    if counted != summary.rows:
        text = f"[red]different[/]  {summary.rows:,} rows were produced, the recount has {counted:,}"
        console.print(text, highlight=False)
    console.print(f"{summary.seconds:.0f} s", highlight=False, end=" · ")
    console.print(f"files in {summary.directory}", markup=False, highlight=False, soft_wrap=True, end=" · ")
    console.print(f"repeat with --seed {summary.seed}", highlight=False)


def starts_table(starts: Sequence[Start]) -> Table:
    """Show how each start ended."""
    table = _table("Starts", "start", "restored from", "killed in")
    for column in ("batches", "replayed", "s"):
        table.add_column(column, justify="right")
    for number, start in enumerate(starts, 1):
        hit = start.outcome.hit or "ran to the end"
        if start.outcome.hit and start.outcome.hit != start.aimed:
            hit += f" (aimed at {start.aimed}, which did not come)"
        table.add_row(
            str(number),
            start.restore or "-",
            hit,
            str(len(start.reports)),
            str(start.replayed()),
            f"{start.outcome.seconds:.1f}",
        )
    return table


def restores_table(starts: Sequence[Start]) -> Table:
    """Show for each store how long each restore took and how much it moved."""
    table = _table("Restores (the local state was deleted before)", "start", "store", "from")
    for column in ("tasks", "slowest s", "bytes", "records"):
        table.add_column(column, justify="right")
    for number, start in enumerate(starts, 1):
        for restore in start.restores():
            table.add_row(
                str(number),
                restore["store"],
                ", ".join(restore["factories"]),
                str(restore["tasks"]),
                f"{restore['slowest_seconds']:.3f}",
                f"{restore['bytes_fetched']:,}",
                f"{restore['records']:,}",
            )
    return table


def first_answer_table(found: FirstAnswer) -> Table:
    """Show when a task with a large state answers, and when its whole state is here."""
    table = _table("A large state from the blob store, on an empty disk", "restored")
    for column in ("first answer, s", "bytes until then", "whole, s", "bytes"):
        table.add_column(column, justify="right")
    seconds = f"{found.first_seconds:.3f}", f"{found.whole_seconds:.3f}", f"{found.restore_seconds:.3f}"
    table.add_row("by need", seconds[0], f"{found.fetched:,}", seconds[1], f"{found.bytes:,}")
    table.add_row("as a whole", seconds[2], f"{found.bytes:,}", seconds[2], f"{found.bytes:,}")
    return table


def totals_table(sides: Sequence[Side], measures: Sequence[str], row_word: str) -> Table:
    """Show the totals of each side with all digits."""
    table = _table("Totals", "")
    totals = [side.total() for side in sides]
    for side in sides:
        table.add_column(side.name, justify="right")
    table.add_row("keys", *(f"{total[0]:,}" for total in totals))
    table.add_row(row_word, *(f"{total[1]:,}" for total in totals))
    table.add_row("unparsable rows", *(f"{total[2]:,}" for total in totals))
    for i, measure in enumerate(map(escape, measures)):
        table.add_row(f"{measure}: missing", *(f"{_at(total[3], i, 0):,}" for total in totals))
        table.add_row(f"{measure}: sum", *(_text(_at(total[4], i, Decimal(0))) for total in totals))
        table.add_row(f"{measure}: largest", *(_text(_at(total[5], i, None)) for total in totals))
    return table


def verdict(console: Console, truth: Side, sides: Sequence[Side]) -> None:
    """Print whether every key of every side equals the recount exactly."""
    for side in sides:
        found = differences(truth, side)
        if found:
            console.print(f"[red]different[/]  {side.name}: {len(found):,} keys differ", highlight=False)
            for line in found[:_DIFFERENCES_SHOWN]:
                console.print(f"    {line}", markup=False, highlight=False)
        else:
            console.print(f"[green]equal[/]  {side.name}: all {len(truth.tallies):,} keys", highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _at(values: Sequence[Any], i: int, default: Any) -> Any:
    return values[i] if i < len(values) else default


def _text(value: Decimal | None) -> str:
    return plain_text(value, ",f") or "-"
