"""``statemgr bench``: measures statemgr and named references, and reports which targets were reached."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from statemgr.config import JobConfig
from statemgr.errors import PrerequisiteMissing, StatemgrError
from statemgr.terminal.options import overrides
from statemgr.terminal.output import console, messages, show_error
from statemgr_tools.bench import registry

if TYPE_CHECKING:
    from statemgr_tools.bench.measure import Report
    from statemgr_tools.bench.result import Line


#: The maximum number of digits of a number of bytes.
_DIGITS = 18


def _scale(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Parse ``full``, ``small``, or a number of bytes instead of 1 GiB into a factor of the table's sizes."""
    from statemgr_tools.bench.session import GIBIBYTE, SMALL

    if value in ("full", "small"):
        return 1.0 if value == "full" else SMALL
    if not value.isdecimal() or len(value) > _DIGITS or int(value) == 0:
        raise click.BadParameter("full, small, or a number of bytes", ctx, param)
    return min(int(value) / GIBIBYTE, 1.0)


@click.command("bench")
@click.option(
    "--case", "cases", multiple=True, type=click.Choice(list(registry.TABLE)), help="Run only this case. Repeatable."
)
@click.option(
    "--size",
    "scale",
    default="full",
    show_default=True,
    callback=_scale,
    metavar="full|small|BYTES",
    help="Run at the sizes in the table, as a smoke test, or with this many bytes instead of 1 GiB.",
)
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(1, 100), help="Number of measurements of each case."
)
@click.option("--json", "as_json", is_flag=True, help="Print each result as one line of JSON.")
@click.option(
    "--markdown",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Also write the table to FILE, between its markers (docs/performance.md), after each case. With --case, "
    "replace the lines of these cases only.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measure how costs grow, and draw the result to FILE.svg or FILE.png. Runs only the cases of --case, if any.",
)
@click.option(
    "--peers",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Directory with the harnesses of the peers (samza, kafka). Without it their lines have no reference.",
)
@click.option(
    "--work",
    default=Path(".statemgr", "bench"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for state, servers and builds of the peers. The whole table needs 20 GB.",
)
@click.option("--config", "-c", "config_file", type=click.Path(), help="Use the servers of this configuration.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a key of the configuration. Repeatable."
)
def command(
    cases: tuple[str, ...],
    scale: float,
    rounds: int,
    as_json: bool,
    markdown: Path | None,
    plot: Path | None,
    peers: Path | None,
    work: Path,
    config_file: str | None,
    settings: tuple[str, ...],
) -> None:
    """Measure commits, restores and calls, and compare them with named references.

    Results are printed and written as soon as they are known, so an interrupt loses only the case that is measured. The
    benchmark starts servers unless the configuration names some. Exit status 1 if a required target is missed at full
    size, or if a case could not be measured.
    """
    from statemgr_tools.bench import plots, render
    from statemgr_tools.bench.session import Plan, Session
    from statemgr_tools.bench.sweeps import all_sweeps
    from statemgr_tools.dev.signals import exit_on_signals

    plan = Plan(scale=scale, rounds=rounds, work=work, peers=peers, given=_given(config_file, settings))
    if plot is not None:
        plots.check_available()
    names = [name for name in registry.TABLE if name in cases or not (cases or plot)]
    try:
        chosen = [registry.find(name) for name in names]
    except ModuleNotFoundError as error:
        raise PrerequisiteMissing(
            f"these cases need {error.name}, which is not installed",
            hint="install it: pip install 'statemgr[bench,spark]'",
        ) from error
    lines: list[Line] = []
    failed: list[str] = []
    page = None if markdown is None else render.Page(markdown, rounds, registry.line_names())
    with exit_on_signals(), _progress() as report, Session(plan, report) as session:
        for case in chosen:
            report(case.name)
            try:
                for line in case.measure(session):
                    _show(line, as_json=as_json, header=not lines)
                    lines.append(line)
                if page is not None:
                    page.write(lines)
            except StatemgrError as error:
                failed.append(case.name)
                show_error(f"{case.name}: {error.message}", error.hint)
        if plot is not None:
            plots.draw(list(all_sweeps(session)), plot)
        for note in session.peers.notes:
            messages().print(f"note: {note}", markup=False)
    must = [case.name for case in chosen if case.must]
    if not as_json:
        messages().print(render.summary(lines, must, failed), markup=False)
    if failed or (session.full and set(render.missed_cases(lines)).intersection(must)):
        raise SystemExit(1)


def _given(config_file: str | None, settings: tuple[str, ...]) -> Mapping[str, object]:
    """Return the keys from the command line and the file. Raises: ConfigError, click.UsageError."""
    if config_file is None:
        return overrides(settings)
    return JobConfig.from_file(config_file, overrides(settings)).to_mapping()


@contextmanager
def _progress() -> Iterator[Report]:
    """Show the current measurement on standard error: a spinner on a terminal, otherwise one line each."""
    stderr = messages()
    if not stderr.is_terminal:
        yield lambda what: stderr.print(what, markup=False)
        return
    with stderr.status("") as status:
        yield lambda what: status.update(what)


def _show(line: Line, *, as_json: bool, header: bool) -> None:
    from statemgr_tools.bench import render

    if as_json:
        click.echo(json.dumps(line.result.to_dict(), ensure_ascii=False))
        return
    out = console()
    out.print(render.table([line], out.width, header=header))
