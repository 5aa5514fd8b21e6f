"""``statemgr materialize``: builds first snapshots from the changelogs of a running job. Fences nobody."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from statemgr.terminal.options import Call, job_options
from statemgr.terminal.output import describe, say, size

if TYPE_CHECKING:
    from statemgr.operations.materialize.tasks import Outcome


@click.command("materialize")
@job_options("tasks")
@click.option("--store", "stores", multiple=True, help="Work on this store only. Repeatable; default: all stores.")
@click.option(
    "--parallel",
    type=click.IntRange(min=1),
    metavar="N",
    help="Build N snapshots at a time. Default: one for each processor.",
)
@click.option("--again", is_flag=True, help="Build a new snapshot even if an offer waits for the job already.")
@click.option("--dry-run", is_flag=True, help="Report which snapshots would be built, and build none.")
def command(call: Call, stores: tuple[str, ...], parallel: int | None, again: bool, dry_run: bool) -> None:
    """Build the first snapshot of every task from its changelog, and offer it to the job.

    The job may be running: it is neither fenced nor restarted. A task adopts the offer when it is opened with
    blob-store among its backup factories, instead of uploading its whole state. If the command is killed, run it again
    on the same machine: it continues.

    \b
    Exit status: 3 a server was not reached, or the blobs could not be uploaded in time
                 4 a changelog cannot supply the state of a checkpoint exactly
    """
    from statemgr.operations.materialize.tasks import materialize_job, wanted_stores

    found = wanted_stores(call.config, call.tasks, stores, again=again)
    wanted = [(task, store) for task, store, reason in found if reason is None]
    outcomes: list[Outcome] = []
    if not dry_run and wanted:
        with call.progress() as progress:
            work = materialize_job(call.config, wanted, parallel=parallel, again=again, progress=progress)
            outcomes += work
    done = {(one.task, one.store): one for one in outcomes}
    rows = [_row(task, store, reason, done.get((task, store))) for task, store, reason in found]
    call.show(
        rows,
        ("task", "store", "result", "checkpoint", "records", "size", "uploaded", "seconds", "expires"),
        [_shown(row) for row in rows],
        empty="the job has no stores that are backed up",
    )
    expiries = [one.done.expires_ms for one in outcomes if one.done is not None and one.done.expires_ms is not None]
    if expiries and not call.as_json:
        say(
            f"restart the job with blob-store among its backup factories before {_minute(min(expiries))}: it adopts an "
            "offer only when it opens a task"
        )
    failed = [one for one in outcomes if one.error is not None]
    for one in failed:
        assert one.error is not None
        say(describe(one.error), style="red")
        if one.error.hint:
            say(one.error.hint)
    if failed:
        raise SystemExit(max(one.error.exit_status for one in failed if one.error))


def _row(task: str, store: str, reason: str | None, outcome: Outcome | None) -> dict[str, Any]:
    row: dict[str, Any] = {"task": task, "store": store}
    if outcome is None:
        return row | {"result": "to do" if reason is None else "not needed", "reason": reason}
    if outcome.done is None:
        return row | {"result": "failed", "reason": None if outcome.error is None else outcome.error.message}
    return asdict(outcome.done) | {"result": "offered" if outcome.done.offered else "not needed"}


def _shown(row: dict[str, Any]) -> tuple[object, ...]:
    result = row["result"] if row.get("reason") is None else f"{row['result']}: {row['reason']}"
    if not row.get("offered"):
        return (row["task"], row["store"], result, row.get("checkpoint_id", ""), "", "", "", "", "")
    return (
        row["task"], row["store"], result, row["checkpoint_id"], row["records"], size(row["size"]),
        size(row["uploaded"]), f"{row['seconds']:.1f}", _minute(row["expires_ms"]),
    )  # fmt: skip


def _minute(millis: int) -> str:
    return datetime.fromtimestamp(millis / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
