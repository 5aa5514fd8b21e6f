"""``statemgr demo``: a PySpark pipeline that is killed and restored. Parses options and prints."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from statemgr.errors import InvalidError, PrerequisiteMissing

if TYPE_CHECKING:
    from rich.console import Console

    from statemgr_tools.demo.settings import Settings


@click.command("demo")
@click.option(
    "--input",
    "input_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A CSV file with a header (.csv, .csv.gz, .zip) instead of the flights.",
)
@click.option("--key", help="Column with the key of the state.")
@click.option(
    "--sum",
    "sums",
    multiple=True,
    help="Column, or product of columns (Quantity*UnitPrice), whose exact sum and maximum are kept.",
)
@click.option(
    "--blob",
    type=click.Choice(["file", "s3", "gcs", "azure"]),
    default="file",
    show_default=True,
    help="Type of the blob store.",
)
@click.option(
    "--kills", type=click.IntRange(0, 50), default=2, show_default=True, help="Number of kills, without --migrate."
)
@click.option("--seed", type=int, help="Chooses the phases of the kills. A run prints its seed, so you can repeat it.")
@click.option(
    "--aim", "aims", multiple=True, help="Phase of the first kill, the second, and so on, instead of random ones."
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".statemgr"),
    show_default=True,
    help="Directory for all files.",
)
@click.option(
    "--migrate",
    is_flag=True,
    help="Move the running job from changelogs to blobs and back instead, with a kill in each stage.",
)
@click.option(
    "--tiny",
    is_flag=True,
    help="Run a service in memory instead, in seconds and without Java, through the stages of a migration.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
def demo(as_json: bool, migrate: bool, tiny: bool, **options: Any) -> None:
    """Process real rows in a Spark job, kill it with SIGKILL, restore it, and compare the result with a recount.

    The rows are the 336,776 flights of 2013 from New York, by tail number, unless --input, --key and --sum name others.
    The demo starts a local Kafka broker and stops it at the end, unless STATEMGR_TEST_KAFKA names a running one. Exit
    status 1 if anything differs from the recount.

    With --migrate, the job moves through all stages of a migration, to 6 tasks and back to changelogs while rows
    arrive, with the commands that a team would use. It takes about five minutes, and draws migration.svg.

    With --tiny, broker and blob store are in memory, and all options but --seed and --json have no effect.
    """
    if tiny:
        sys.exit(0 if _tiny(options["seed"], as_json) else 1)
    settings = _settings(**options)
    if migrate and settings.aims:
        raise InvalidError("--aim has no effect with --migrate", hint="--seed chooses the moments of its kills")
    from rich.console import Console

    console = Console(stderr=as_json)
    equal = _migration(settings, console, as_json) if migrate else _restores(settings, console, as_json)
    sys.exit(0 if equal else 1)


def _tiny(seed: int | None, as_json: bool) -> bool:
    from rich.console import Console

    from statemgr_tools.demo.tiny import tiny, to_json

    seed = _drawn(seed)
    found = to_json(tiny(seed, Console(stderr=as_json)), seed)
    if as_json:
        _print_json(found)
    return bool(found["equal"])


def _restores(settings: Settings, console: Console, as_json: bool) -> bool:
    from statemgr_tools.demo.flow import demo as run
    from statemgr_tools.demo.show import page

    summary = run(settings, os.environ, console)
    _print_json(summary.to_dict()) if as_json else page(summary, console)
    return summary.equal


def _migration(settings: Settings, console: Console, as_json: bool) -> bool:
    from statemgr_tools.demo.migration import migrate
    from statemgr_tools.demo.show import migration_page

    summary = migrate(settings, os.environ, console)
    _print_json(summary.to_dict()) if as_json else migration_page(summary, console)
    return summary.equal


def _print_json(summary: dict[str, Any]) -> None:
    click.echo(json.dumps(summary, ensure_ascii=False, indent=2))


def _drawn(seed: int | None) -> int:
    return secrets.randbelow(100_000) if seed is None else seed


def _settings(
    input_file: Path | None,
    key: str | None,
    sums: tuple[str, ...],
    blob: str,
    kills: int,
    seed: int | None,
    aims: tuple[str, ...],
    directory: Path,
) -> Settings:
    if importlib.util.find_spec("pyspark") is None:
        raise PrerequisiteMissing("PySpark is not installed", hint="pip install 'statemgr[demo]'")
    from statemgr_tools.demo.bait import AIMS
    from statemgr_tools.demo.dataset import FLIGHTS_KEY, FLIGHTS_SUMS
    from statemgr_tools.demo.settings import Settings

    if input_file is None and (key or sums):
        raise InvalidError("--key and --sum need a file", hint="name the file with --input")
    if input_file is not None and not (key and sums):
        raise InvalidError("--input needs --key and at least one --sum")
    for aim in aims:
        if aim not in list(AIMS):
            raise InvalidError(f"{aim!r} is not a phase of a batch", hint=f"one of {', '.join(AIMS)}")
    return Settings(
        directory=directory,
        blob=blob,
        seed=_drawn(seed),
        kills=kills,
        sums=sums or FLIGHTS_SUMS,
        key=key or FLIGHTS_KEY,
        input=input_file,
        aims=aims,
    )
