"""The demo's one page at the end, and the two sides that it compares. Prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from spark_integration.demo.child import Outcome
from spark_integration.demo.verify import Side

_DIFFERENCES_SHOWN = 5


@dataclass
class Start:
    """One start of the pipeline: what it restored from, its batches, and how it ended."""

    restore: str | None
    outcome: Outcome
    reports: list[dict[str, Any]] = field(default_factory=list)

    def restored(self) -> list[dict[str, Any]]:
        """Reports of stores that came from a backend."""
        stores = [store for report in self.reports for store in report["restored"]]
        return [store for store in stores if store["factory"] not in ("local", "empty")]


def starts_table(starts: Sequence[Start], aims: Sequence[tuple[str, int]]) -> Table:
    """How each start ended."""
    table = _table("Starts", "start", "restored from", "killed in")
    for column in ("batches", "replayed", "s"):
        table.add_column(column, justify="right")
    for number, start in enumerate(starts):
        hit = start.outcome.hit or "ran to the end"
        if start.outcome.hit and start.outcome.hit != aims[number][0]:
            hit += f" (aimed at {aims[number][0]}, which did not come)"
        table.add_row(
            str(number + 1),
            start.restore or "-",
            hit,
            str(len(start.reports)),
            str(sum(report["replayed"] for report in start.reports)),
            f"{start.outcome.seconds:.1f}",
        )
    return table


def restores_table(starts: Sequence[Start]) -> Table:
    """How long each restore took and what it moved, per store."""
    table = _table("Restores (the local state was deleted before)", "start", "store", "from")
    for column in ("tasks", "slowest s", "bytes", "records"):
        table.add_column(column, justify="right")
    for number, start in enumerate(starts, 1):
        stores = start.restored()
        for name in sorted({store["store"] for store in stores}):
            ours = [store for store in stores if store["store"] == name]
            table.add_row(
                str(number),
                name,
                ", ".join(sorted({store["factory"] for store in ours})),
                str(len(ours)),
                f"{max(store['seconds'] for store in ours):.3f}",
                f"{sum(store['bytes_fetched'] for store in ours):,}",
                f"{sum(store['records'] for store in ours):,}",
            )
    return table


def totals_table(sides: Sequence[Side], measures: Sequence[str], row_word: str) -> Table:
    """Each side's totals, to the last digit."""
    table = _table("Totals", "")
    totals = [side.total() for side in sides]
    for side in sides:
        table.add_column(side.name, justify="right")
    table.add_row("keys", *(f"{total[0]:,}" for total in totals))
    table.add_row(row_word, *(f"{total[1]:,}" for total in totals))
    table.add_row("unparsable rows", *(f"{total[2]:,}" for total in totals))
    for i, measure in enumerate(measures):
        table.add_row(f"{measure}: missing", *(f"{_at(total[3], i, 0):,}" for total in totals))
        table.add_row(f"{measure}: sum", *(_text(_at(total[4], i, Decimal(0))) for total in totals))
        table.add_row(f"{measure}: largest", *(_text(_at(total[5], i, None)) for total in totals))
    return table


def differences(truth: Side, side: Side) -> list[str]:
    """Keys whose tallies are not equal, in words."""
    keys = sorted({*truth.tallies, *side.tallies})
    return [
        f"{side.name}: key {key!r} has {side.tallies.get(key)}, the recount {truth.tallies.get(key)}"
        for key in keys
        if truth.tallies.get(key) != side.tallies.get(key)
    ]


def verdict(console: Console, truth: Side, sides: Sequence[Side]) -> bool:
    """Say whether every key of every side equals the recount, to the last digit."""
    equal = True
    for side in sides:
        found = differences(truth, side)
        if found:
            equal = False
            console.print(f"[red]different[/]  {side.name}: {len(found):,} keys differ", highlight=False)
            for line in found[:_DIFFERENCES_SHOWN]:
                console.print(f"    {line}", markup=False, highlight=False)
        else:
            console.print(f"[green]equal[/]  {side.name}: all {len(truth.tallies):,} keys", highlight=False)
    return equal


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
    if value is None:
        return "-"
    value = value.normalize() if value == value.to_integral_value() else value
    return f"{value:,f}".rstrip("0").rstrip(".") if "." in f"{value:f}" else f"{value:,f}"
