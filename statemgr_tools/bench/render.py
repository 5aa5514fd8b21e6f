"""Shows results as a table for people and as Markdown for the documentation, and the verdict of a complete run."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil
from rich.table import Table
from rich.text import Text

from statemgr.errors import InvalidError
from statemgr_tools.bench.result import Line

HEADERS = ("case", "value", "unit", "reference", "its value", "ratio", "to reach", "verdict")
#: Of the cases that need not be reached, this many may be missed, none of them by more than this share.
MISSES_ALLOWED, MISS_ALLOWED = 3, 0.25
#: The documentation has the measured results between these markers.
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
#: The start of the sentence that names the cases of other runs.
_ALONE = "Measured in other runs than the rest:"
#: The width of each column of a table, in characters; the column of the reference takes the rest of the line.
_WIDTHS = {"case": 18, "value": 8, "unit": 20, "its value": 9, "ratio": 18, "to reach": 8, "verdict": 15}
_NARROWEST, _WIDEST = 12, 80
_STYLES = {"reached": "green", "missed": "bold red"}


def cells(line: Line) -> tuple[str, ...]:
    """Return one line as texts."""
    result = line.result
    return (
        result.case,
        number(result.value),
        result.unit,
        result.reference,
        number(result.reference_value),
        number(result.ratio) + (f" ({number(result.spread[0])}–{number(result.spread[1])})" if result.spread else ""),
        result.target or "",
        verdict(line),
    )


def verdict(line: Line) -> str:
    """Return ``reached``, ``missed by 12 %``, or an empty text if there is no verdict."""
    if line.result.reached is None:
        return "–" if line.result.target else ""
    return "reached" if line.result.reached else f"missed by {line.miss:.0%}"


def table(lines: Sequence[Line], width: int, *, header: bool) -> Table:
    """Return a part of a table that is ``width`` characters wide. All parts have columns of the same widths."""
    made = Table(box=None, pad_edge=False, header_style="bold", show_header=header)
    gaps = len(HEADERS) - 1
    reference = min(max(_NARROWEST, width - gaps - sum(_WIDTHS.values())), _WIDEST)
    for name in HEADERS:
        right = name in ("value", "its value", "ratio")
        made.add_column(name, width=_WIDTHS.get(name, reference), overflow="fold", justify="right" if right else "left")
    for line in lines:
        texts = cells(line)
        style = _STYLES.get(texts[-1].partition(" ")[0], "")
        made.add_row(*(Text(text) for text in texts[:-1]), Text(texts[-1], style=style))
    return made


def markdown(lines: Sequence[Line]) -> str:
    """Return the table for ``docs/performance.md``."""
    rows = [HEADERS, ("---",) * len(HEADERS), *(cells(line) for line in lines)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


class Page:
    """A page with the table between its markers, and a sentence about the run. The rest of the page stays as it is.

    Args:
        order: all cases, in the order of the table.

    Raises: InvalidError if the page has no markers.
    """

    def __init__(self, path: Path, rounds: int, order: Sequence[str]) -> None:
        self._path = path
        self._order = order
        self._about = f"{_machine()}; {rounds} rounds."
        self._before, begin, rest = path.read_text().partition(BEGIN)
        self._table, end, self._after = rest.partition(END)
        if not begin or not end:
            raise InvalidError("the page has no place for the table", hint=f"it goes between {BEGIN} and {END}")

    def write(self, lines: Sequence[Line]) -> None:
        """Write the lines of this run. As long as it has not measured all cases, they replace those of the same cases,
        and a sentence says which cases of the table are not of the same run as most of the others."""
        head, rule, *rows = markdown(lines).splitlines()
        about, measured = self._about, {_case(row) for row in rows}
        if not measured.issuperset(self._order):
            old = [row for row in self._table.splitlines() if _case(row) in self._order and _case(row) not in measured]
            if len(measured) > len(self._order) / 2:  # a whole run in which some cases could not be measured
                alone = [name for name in self._order if name in map(_case, old)]
            else:
                named = self._table.partition(_ALONE)[2].partition("\n")[0]
                alone = [name for name in self._order if name in measured or f"`{name}`" in named]
                about = self._table.strip().partition("\n")[0] or about
            if alone:
                about += f"\n\n{_ALONE} {', '.join(f'`{name}`' for name in alone)}."
            rows = sorted(old + rows, key=lambda row: self._order.index(_case(row)))
        table = "\n".join([head, rule, *rows])
        self._path.write_text(f"{self._before}{BEGIN}\n\n{about}\n\n{table}\n\n{END}{self._after}")


def _machine() -> str:
    memory = psutil.virtual_memory().total / 1e9
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors, {memory:.0f} GB of memory"
    return f"{machine}, Python {platform.python_version()}"


def _case(row: str) -> str:
    """Return the case of a row of a Markdown table."""
    return row.partition("|")[2].partition("|")[0].strip()


def summary(lines: Sequence[Line], must: Collection[str], failed: Collection[str] = ()) -> str:
    """Return a sentence about the complete run, in which the cases ``failed`` could not be measured."""
    missed = missed_cases(lines)
    required = sorted(set(missed) & set(must))
    unknown = sorted(name for name in must if name not in missed and not _has_verdict(name, lines, failed))
    others = {name: by for name, by in missed.items() if name not in must}
    parts = [f"must be reached and were not: {', '.join(required)}"] if required else []
    parts += [f"must be reached and were not measured: {', '.join(unknown)}"] if unknown else []
    parts = parts or ["all that must be reached were"]
    if others:
        parts.append(f"{len(others)} of the others missed (allowed: {MISSES_ALLOWED}): {', '.join(sorted(others))}")
        parts += [f"{name} by more than {MISS_ALLOWED:.0%}" for name, by in others.items() if by > MISS_ALLOWED]
    return "; ".join(parts)


def _has_verdict(name: str, lines: Sequence[Line], failed: Collection[str]) -> bool:
    verdicts = [line.result.reached for line in lines if line.result.case == name and line.result.target is not None]
    return name not in failed and bool(verdicts) and None not in verdicts


def missed_cases(lines: Sequence[Line]) -> dict[str, float]:
    """Return case → the largest share by which one of its lines missed its target."""
    missed: dict[str, float] = {}
    for line in lines:
        if line.result.reached is False:
            missed[line.result.case] = max(line.miss, missed.get(line.result.case, 0.0))
    return missed


def number(value: float | None) -> str:
    """Return a number with three significant digits, and with separators if it is large."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
