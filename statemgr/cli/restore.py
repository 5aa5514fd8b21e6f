"""``statemgr restore``: published state into a directory, as files. Fences nobody."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from statemgr.cli.options import checkpoint_option, json_option, tasks_option, with_config
from statemgr.cli.output import messages, print_json, print_table, progress_bars, size
from statemgr.config import JobConfig
from statemgr.ids import task_path


@click.command("restore")
@with_config
@json_option
@tasks_option
@checkpoint_option
@click.option(
    "--into",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory to restore to, as <task>/<store>.",
)
@click.option("--store", "stores", multiple=True, help="Restore only this store. Repeatable; default: all stores.")
@click.option(
    "--factory", "factories", multiple=True, help="Restore from this backend. Repeatable, most preferred first."
)
def command(
    config: JobConfig,
    as_json: bool,
    tasks: tuple[str, ...],
    checkpoint_id: str | None,
    into: Path,
    stores: tuple[str, ...],
    factories: tuple[str, ...],
) -> None:
    """Restore committed state into a directory. A running job is not disturbed."""
    from statemgr.reader import JobReader

    rows = []
    with JobReader(config) as reader, progress_bars(quiet=as_json) as progress:
        for task in list(tasks) or reader.tasks(checkpoint_id):
            target = into / task_path(task)
            restored = reader.restore(
                task, target, checkpoint_id, list(stores) or None, list(factories) or None, progress
            )
            rows += [{"task": task, **asdict(store), "path": str(target / store.store)} for store in restored]
    if as_json:
        print_json(rows)
        return
    print_table(
        ("task", "store", "from", "fetched", "reused", "records", "seconds", "path"),
        [
            (
                row["task"],
                row["store"],
                row["factory"],
                size(row["bytes_fetched"]),
                size(row["bytes_reused"]),
                row["records"],
                f"{row['seconds']:.2f}",
                row["path"],
            )
            for row in rows
        ],
        empty="no stores",
    )
    for row in rows:
        for factory, reason in row["reasons"].items():
            messages().print(f"note: {row['task']} / {row['store']}: {factory} was not used: {reason}", markup=False)
