"""``statemgr restore``: restores published state into a directory. Fences nobody."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from statemgr.ids import task_path
from statemgr.terminal.options import Call, job_options
from statemgr.terminal.output import say, size


@click.command("restore")
@job_options("tasks", "checkpoint")
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
def command(call: Call, into: Path, stores: tuple[str, ...], factories: tuple[str, ...]) -> None:
    """Restore committed state into a directory. A running job is not disturbed."""
    found = []
    with call.reader() as reader, call.progress() as progress:
        for task in call.tasks or reader.tasks(call.checkpoint_id):
            target = into / task_path(task)
            restored = reader.restore(
                task, target, call.checkpoint_id, list(stores) or None, list(factories) or None, progress
            )
            found += [{"task": task, **asdict(store), "path": str(target / store.store)} for store in restored]
    call.show(
        found,
        ("task", "store", "from", "fetched", "reused", "records", "seconds", "path"),
        [
            (
                one["task"],
                one["store"],
                one["factory"],
                size(one["bytes_fetched"]),
                size(one["bytes_reused"]),
                one["records"],
                f"{one['seconds']:.2f}",
                one["path"],
            )
            for one in found
        ],
        empty="no stores",
    )
    for one in [] if call.as_json else found:
        for factory, reason in one["reasons"].items():
            say(f"note: {one['task']} / {one['store']}: {factory} was not used: {reason}")
