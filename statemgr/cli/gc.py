"""``statemgr gc``: deletes the blobs that no retained checkpoint needs. Fences nobody."""

from __future__ import annotations

import re

import click

from statemgr.cli.options import json_option, with_config
from statemgr.cli.output import messages, print_json, print_table, progress_bars, size
from statemgr.config import JobConfig
from statemgr.errors import MissingError, RetryableError
from statemgr.flows.gc_fates import Collection, Fate, Request

_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 24 * 3_600_000}
_MEANINGS = {
    Fate.KEPT: "a retained checkpoint needs them",
    Fate.YOUNG: "unneeded, younger than the grace period",
    Fate.ORPHAN: "unneeded and old: garbage",
    Fate.UNKNOWN: "of tasks whose checkpoint is not known: left alone",
    Fate.FOREIGN: "names that statemgr never gives: left alone",
}


def _duration(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A callback: ``36h`` and the like, in milliseconds."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,9})([smhd])", value.strip())
    if not found:
        raise click.BadParameter("a number with s, m, h or d is wanted, like 36h", ctx, param)
    return int(found[1]) * _UNITS_MS[found[2]]


@click.command("gc")
@with_config
@json_option
@click.option("--dry-run", is_flag=True, help="Only report.")
@click.option(
    "--grace",
    "grace_ms",
    callback=_duration,
    metavar="TIME",
    help="Age below which nothing is garbage, like 36h or 2d; default and least: one day, "
    "or twice task.commit.timeout.ms if that is more.",
)
@click.option("--mend", is_flag=True, help="Remove the TTL of published blobs that would expire.")
@click.option(
    "--allow-no-checkpoints",
    is_flag=True,
    help="Also collect what belongs to a job or a task that has no checkpoint: it is given up.",
)
def command(
    config: JobConfig, as_json: bool, dry_run: bool, grace_ms: int | None, mend: bool, allow_no_checkpoints: bool
) -> None:
    """Delete the blobs that no retained checkpoint needs and that are old. The job may be running.

    \b
    Exit status: 1 published blobs would expire (see --mend) · 3 something could not be deleted
                 4 a blob that a retained checkpoint needs is missing or corrupt: nothing is deleted
    """
    from statemgr.flows.gc import collect
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.wiring import open_services

    if mend and dry_run:
        raise click.UsageError("--mend changes something, --dry-run nothing: leave one out")
    request = Request(grace_ms=grace_ms, delete=not dry_run, mend=mend, allow_no_checkpoints=allow_no_checkpoints)
    services = open_services(config)
    try:
        log = CheckpointTopic(config, services.clock)
        try:
            with progress_bars(quiet=as_json) as progress:
                found = collect(services, log, request, progress)
        finally:
            log.close()
    finally:
        services.close()
    if as_json:
        print_json(_as_json(found, dry_run=dry_run))
    else:
        _print(found, dry_run=dry_run)
    status = _status(found)
    if status:
        raise SystemExit(status)


def _status(found: Collection) -> int:
    if found.missing:
        return MissingError.exit_status
    if found.failed:
        return RetryableError.exit_status
    return 1 if len(found.mended) < len(found.expiring) else 0


def _as_json(found: Collection, *, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "grace_ms": found.grace_ms,
        **{fate.value: {"blobs": pile.blobs, "bytes": pile.size} for fate, pile in found.piles.items()},
        "orphan_examples": found.examples,
        "deleted": {"blobs": found.deleted.blobs, "bytes": found.deleted.size},
        "expiring": found.expiring,
        "mended": found.mended,
        "missing": found.missing,
        "unfinished": found.unfinished,
        "abandoned": found.abandoned,
        "failed": {blob_id: error.message for blob_id, error in sorted(found.failed.items())},
        "notes": found.notes,
    }


def _print(found: Collection, *, dry_run: bool) -> None:
    rows: list[tuple[object, ...]] = [
        (fate.value, pile.blobs, size(pile.size), _MEANINGS[fate])
        for fate, pile in found.piles.items()
        if pile.blobs or fate in (Fate.KEPT, Fate.ORPHAN)
    ]
    if found.expiring:
        rows.append(("expiring", len(found.expiring), "", "needed and published, but still with a TTL"))
    if found.unfinished:
        rows.append(("unfinished", found.unfinished, "", "uploads begun before the grace period"))
    if not dry_run:
        rows.append(("deleted", found.deleted.blobs, size(found.deleted.size), f"{found.abandoned} unfinished uploads"))
    print_table(("", "blobs", "size", "what they are"), rows, empty="")
    say = messages()
    for note in found.notes:
        say.print(f"note: {note}", markup=False)
    for blob_id in found.missing:
        say.print(f"missing: {blob_id}", markup=False, style="red")
    for blob_id in sorted(set(found.expiring) - set(found.mended)):
        say.print(f"would expire: {blob_id} (--mend removes its TTL)", markup=False)
    for blob_id, error in sorted(found.failed.items()):
        say.print(f"not done: {blob_id}: {error.message}", markup=False, style="red")
    if found.missing:
        say.print("nothing is deleted while a blob is missing: `statemgr snapshots list`", markup=False)
    elif dry_run and (found.piles[Fate.ORPHAN].blobs or found.unfinished):
        say.print("nothing was deleted: this was a dry run", markup=False)
