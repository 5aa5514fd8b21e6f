"""``statemgr gc``: finds the blobs that no retained checkpoint needs. Only ``--write`` deletes them. Fences nobody."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING

import click

from statemgr.errors import MissingError, RetryableError
from statemgr.terminal.options import Call, duration, job_options
from statemgr.terminal.output import moment, print_json, print_table, say, size

if TYPE_CHECKING:
    from statemgr.operations.gc.gc import GarbageReport
    from statemgr.operations.gc.layouts import RetiredReport


@click.command("gc")
@job_options()
@click.option("--write", is_flag=True, help="Delete the garbage. Without it, only print what would be deleted.")
@click.option(
    "--grace",
    "grace_s",
    callback=duration(unit=None),
    metavar="TIME",
    help="Keep everything younger than this, such as 36h or 2d. Default and minimum: one day.",
)
@click.option(
    "--fix", is_flag=True, help="With --write: remove the TTL of blobs that a checkpoint needs and that would expire."
)
@click.option(
    "--allow-no-checkpoints",
    is_flag=True,
    help="Also delete the blobs of a job or a task that has no checkpoint.",
)
def command(call: Call, write: bool, grace_s: float | None, fix: bool, allow_no_checkpoints: bool) -> None:
    """Find old blobs that no retained checkpoint needs, and delete them with --write. The job may be running.

    \b
    Exit status: 1 needed blobs would expire (see --fix), or a layout that a rescale has replaced has lost a blob
                 3 something could not be deleted
                 4 a blob that a retained checkpoint needs is missing or corrupt: nothing is deleted
    """
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.operations.gc.gc import collect_garbage
    from statemgr.wiring import open_services

    if fix and not write:
        raise click.UsageError("--fix changes blobs: add --write")
    with (
        closing(open_services(call.config)) as services,
        closing(CheckpointTopic(call.config, services.clock)) as log,
        call.progress() as progress,
    ):
        found = collect_garbage(
            services,
            log,
            progress,
            grace_ms=None if grace_s is None else round(grace_s * 1000),
            delete=write,
            fix=fix,
            allow_no_checkpoints=allow_no_checkpoints,
        )
    if call.as_json:
        print_json(_as_json(found, written=write))
    else:
        _print(found, str(call.config.get("kafka.bootstrap.servers")), written=write)
    status = _status(found)
    if status:
        raise SystemExit(status)


def _status(found: GarbageReport) -> int:
    if found.missing:
        return MissingError.exit_status
    if found.failed:
        return RetryableError.exit_status
    is_damaged = any(layout.lost and not layout.collected for layout in found.layouts)
    return 1 if is_damaged or len(found.fixed) < len(found.expiring) else 0


def _as_json(found: GarbageReport, *, written: bool) -> dict[str, object]:
    return {
        "written": written,
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


def _print(found: GarbageReport, kafka: str, *, written: bool) -> None:
    from statemgr.operations.gc.gc import BlobStatus

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
    if written:
        rows.append(("deleted", found.deleted.blobs, size(found.deleted.size), f"{found.abandoned} unfinished uploads"))
    print_table(("", "blobs", "size", "what they are"), rows, empty="")
    for note in found.notes:
        say(f"note: {note}")
    for layout in found.layouts:
        _print_layout(layout, kafka)
    for blob_id in found.missing:
        say(f"missing: {blob_id}", style="red")
    for blob_id in sorted(set(found.expiring) - set(found.fixed)):
        say(f"would expire: {blob_id} (--fix --write removes its TTL)")
    for blob_id, error in sorted(found.failed.items()):
        say(f"failed: {blob_id}: {error.message}", style="red")
    if found.missing and found.deleted.blobs:
        say(
            "a checkpoint that was published meanwhile needs it. The clocks of the blob store and of the job's machines"
        )
        say("differ too much: restart the job, whose owner then makes the backup again, and correct the clocks")
    elif found.missing:
        say("nothing was deleted, because a blob is missing: `statemgr snapshots verify` shows which state needs it")
    elif not written:
        say("nothing was changed; add --write to delete the orphans")


def _print_layout(layout: RetiredReport, kafka: str) -> None:
    name = f"the layout with {layout.tasks} tasks, replaced at {moment(layout.retired_ms)},"
    if layout.lost and not layout.collected:
        say(f"{name} has lost {layout.lost}: nothing repairs it, and its other blobs are left alone", style="red")
    if layout.collected:
        say(f"{name} is collected: the next run deletes its blobs, if it has any")
        if layout.changelogs:
            say("the job does not need its changelogs any more. This is the only run that names them. To delete them:")
        for topic in layout.changelogs:
            pattern = topic.replace(".", "\\.")  # the command takes a regular expression
            say(f"  kafka-topics.sh --bootstrap-server {quote(kafka)} --delete --topic {quote(pattern)}")
    elif layout.collectable:
        say(
            f"{name} is old: --write collects it, and `statemgr rescale --undo` cannot go back to it any more",
            style="yellow",
        )
        if layout.changelogs:
            say(f"then the job does not need its changelogs any more: {', '.join(layout.changelogs)}")
    elif layout.kept:
        say(f"{name} keeps {', '.join(layout.kept)}: it stays until `statemgr checkpoints tag --drop` releases them")
    else:
        say(f"{name} is kept until it is older than the grace period; `statemgr rescale --undo` goes back to it")
