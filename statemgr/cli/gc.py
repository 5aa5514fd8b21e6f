"""``statemgr gc``: deletes the blobs that no retained checkpoint needs. Fences nobody."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from statemgr.cli.options import Call, job_options
from statemgr.cli.output import moment, print_json, print_table, say, size
from statemgr.config.units import DAY_MS, HOUR_MS
from statemgr.errors import MissingError, RetryableError

if TYPE_CHECKING:
    from statemgr.flows.gc import GarbageReport

_UNITS_MS = {"s": 1000, "m": 60_000, "h": HOUR_MS, "d": DAY_MS}


def _duration(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """``36h`` and the like, in milliseconds."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,9})([smhd])", value.strip())
    if not found:
        raise click.BadParameter("give a number with s, m, h or d, such as 36h", ctx, param)
    return int(found[1]) * _UNITS_MS[found[2]]


@click.command("gc")
@job_options()
@click.option("--dry-run", is_flag=True, help="Report what would be deleted, and delete nothing.")
@click.option(
    "--grace",
    "grace_ms",
    callback=_duration,
    metavar="TIME",
    help="Keep everything younger than this, such as 36h or 2d. Default and minimum: one day, "
    "or twice task.commit.timeout.ms if that is longer.",
)
@click.option("--fix", is_flag=True, help="Remove the TTL of blobs that a checkpoint needs and that would expire.")
@click.option(
    "--allow-no-checkpoints",
    is_flag=True,
    help="Also delete the blobs of a job or a task that has no checkpoint.",
)
def command(call: Call, dry_run: bool, grace_ms: int | None, fix: bool, allow_no_checkpoints: bool) -> None:
    """Delete old blobs that no retained checkpoint needs. The job may be running.

    \b
    Exit status: 1 needed blobs would expire (see --fix) · 3 something could not be deleted
                 4 a blob that a retained checkpoint needs is missing or corrupt: nothing is deleted
    """
    from statemgr.flows.gc import collect_garbage
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.wiring import open_services

    if fix and dry_run:
        raise click.UsageError("--fix and --dry-run cannot be used together")
    with (
        closing(open_services(call.config)) as services,
        closing(CheckpointTopic(call.config, services.clock)) as log,
        call.progress() as progress,
    ):
        found = collect_garbage(
            services,
            log,
            progress,
            grace_ms=grace_ms,
            delete=not dry_run,
            fix=fix,
            allow_no_checkpoints=allow_no_checkpoints,
        )
    if call.as_json:
        print_json(_as_json(found, dry_run=dry_run))
    else:
        _print(found, dry_run=dry_run)
    status = _status(found)
    if status:
        raise SystemExit(status)


def _status(found: GarbageReport) -> int:
    if found.missing:
        return MissingError.exit_status
    if found.failed:
        return RetryableError.exit_status
    return 1 if len(found.fixed) < len(found.expiring) else 0


def _as_json(found: GarbageReport, *, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "grace_ms": found.grace_ms,
        **{status.value: {"blobs": count.blobs, "bytes": count.size} for status, count in found.counts.items()},
        "orphan_examples": found.examples,
        "deleted": {"blobs": found.deleted.blobs, "bytes": found.deleted.size},
        "expiring": found.expiring,
        "fixed": found.fixed,
        "missing": found.missing,
        "unfinished": found.unfinished,
        "abandoned": found.abandoned,
        "expired_offers": len(found.expired),
        "failed": {blob_id: error.message for blob_id, error in sorted(found.failed.items())},
        "notes": found.notes,
        "layouts": [asdict(layout) for layout in found.layouts],
    }


def _print(found: GarbageReport, *, dry_run: bool) -> None:
    from statemgr.flows.gc import BlobStatus

    meanings = {
        BlobStatus.KEPT: "needed by a retained checkpoint",
        BlobStatus.YOUNG: "not needed, but younger than the grace period",
        BlobStatus.ORPHAN: "not needed, and old: garbage",
        BlobStatus.UNKNOWN: "of tasks without a known checkpoint: kept",
        BlobStatus.FOREIGN: "with names that statemgr does not use: kept",
    }
    rows: list[tuple[object, ...]] = [
        (status.value, count.blobs, size(count.size), meanings[status])
        for status, count in found.counts.items()
        if count.blobs or status in (BlobStatus.KEPT, BlobStatus.ORPHAN)
    ]
    if found.expiring:
        rows.append(("expiring", len(found.expiring), "", "needed, but still with a TTL"))
    if found.unfinished:
        rows.append(("unfinished", found.unfinished, "", "uploads that began before the grace period and never ended"))
    if found.expired:
        rows.append(
            ("offers", len(found.expired), "", "of first snapshots, and expired for longer than a grace period")
        )
    if not dry_run:
        rows.append(("deleted", found.deleted.blobs, size(found.deleted.size), f"{found.abandoned} unfinished uploads"))
    print_table(("", "blobs", "size", "what they are"), rows, empty="")
    for note in found.notes:
        say(f"note: {note}")
    for layout in found.layouts:
        name = f"the layout with {layout.tasks} tasks, replaced at {moment(layout.retired_ms)},"
        if layout.collected:
            say(f"{name} is collected: the next run deletes its blobs; its changelogs can be deleted")
        else:
            say(f"{name} is kept until it is older than the grace period; `statemgr rescale --undo` goes back to it")
    for blob_id in found.missing:
        say(f"missing: {blob_id}", style="red")
    for blob_id in sorted(set(found.expiring) - set(found.fixed)):
        say(f"would expire: {blob_id} (--fix removes its TTL)")
    for blob_id, error in sorted(found.failed.items()):
        say(f"failed: {blob_id}: {error.message}", style="red")
    if found.missing:
        say("nothing was deleted, because a blob is missing: `statemgr snapshots list` shows which state needs it")
    elif dry_run and (found.counts[BlobStatus.ORPHAN].blobs or found.unfinished or found.expired):
        say("this was a dry run: nothing was deleted")
