"""``statemgr snapshots``: shows what the blob store has for retained checkpoints, and compares two. Reads only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from statemgr.config.factories import BLOB_STORE
from statemgr.errors import CorruptError, MissingError
from statemgr.ids import task_index, task_name
from statemgr.logs import counted
from statemgr.operations.snapshots.diff import diff_command
from statemgr.terminal.options import Call, job_options, task_option
from statemgr.terminal.output import moment, print_json, print_table, say, size
from statemgr.terminal.render import index_to_json_dict

if TYPE_CHECKING:
    from statemgr.health.verify_blobs import Verified
    from statemgr.model.checkpoint import BlobRef, CheckpointRecord, Marker
    from statemgr.reader import JobReader


@click.group("snapshots")
def command() -> None:
    """List, show, verify and compare snapshots in the blob store."""


command.add_command(diff_command)


@command.command("list", short_help="List the snapshots of every store.")
@job_options("tasks")
def list_command(call: Call) -> None:
    """List the snapshot of every store in every retained checkpoint; exit status 4 if one is missing."""
    found: list[dict[str, object]] = []
    with call.reader() as reader:
        records = reader.retaining(tasks=call.tasks) if call.tasks else reader.records().values()
        for record in sorted(records, key=lambda record: task_index(record.task)):
            found += _snapshots(reader, record)
    columns = ("task", "checkpoint (* current)", "store", "files", "size", "segments", "index blob")
    call.show(found, columns, [_row(entry) for entry in found], empty="no snapshots yet")
    if any(entry["problem"] for entry in found):
        raise SystemExit(MissingError.exit_status)


def _snapshots(reader: JobReader, record: CheckpointRecord) -> Iterator[dict[str, object]]:
    """One entry per retained checkpoint and store. ``problem`` says why a snapshot could not be read.

    ``segments`` counts the segments of changes after the snapshot, and ``segments_size`` their bytes.
    """
    for checkpoint in record.checkpoints:
        for store, marker in sorted(checkpoint.state_checkpoint_markers.get(BLOB_STORE, {}).items()):
            yield {
                "task": record.task,
                "checkpoint_id": str(checkpoint.checkpoint_id),
                "current": checkpoint is record.current,
                "store": store,
                **_described(reader, record.task, store, marker),
            }


def _described(reader: JobReader, task: str, store: str, marker: Marker) -> dict[str, object]:
    ref: BlobRef | None = None
    try:
        chain = reader.chain(task, store, marker)
        ref = chain.snapshot.index
        index = reader.snapshot(task, store, ref)
    except (MissingError, CorruptError) as error:
        unknown = dict.fromkeys(("files", "size", "segments", "segments_size", "created_ms"))
        where = {"index": ref and ref.blob_id, "index_size": ref and ref.size}
        return {**where, **unknown, "problem": error.message}
    return {
        "index": ref.blob_id,
        "index_size": ref.size,
        "files": sum(1 for _ in index.root.walk()),
        "size": index.root.size,
        "segments": len(chain.segments),
        "segments_size": sum(segment.size for segment in chain.segments),
        "created_ms": index.created_ms,
        "problem": None,
    }


def _row(entry: dict[str, object]) -> tuple[object, ...]:
    return (
        entry["task"],
        f"{entry['checkpoint_id']}{' *' if entry['current'] else ''}",
        entry["store"],
        "" if entry["files"] is None else entry["files"],
        "" if entry["size"] is None else size(int(str(entry["size"]))),
        "" if not entry["segments"] else f"{entry['segments']}, {size(int(str(entry['segments_size'])))}",
        entry["problem"] or entry["index"],
    )


@command.command("show", short_help="Show every file of a snapshot.")
@job_options("checkpoint")
@task_option
@click.argument("store")
def show_command(call: Call, task: str | None, store: str) -> None:
    """Show every file of the snapshot of STORE, and where its parts are (of Partition 0 by default)."""
    with call.reader() as reader:
        index = reader.index(task or task_name(0), store, call.checkpoint_id)
    if not call.as_json:
        head = f"{index.task} / {index.store}, state {index.state_id}, made {moment(index.created_ms)}"
        say(f"{head}, {size(index.root.size)}")
    rows = [
        (path, file.size, stored, file.hash.hex(), "in the index" if file.inline is not None else part)
        for path, file in index.root.walk()
        for part, stored in ([(blob.blob_id, stored) for blob, stored in file.stored()] or [("", file.size)])
    ]
    headers = ("file", "bytes", "stored", "hash", "part")
    call.show(index_to_json_dict(index), headers, rows, empty="no files")


def _share(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """``5%`` as 0.05."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)\s*%", value.strip())
    if not found or not 0 < float(found[1]) <= 100:
        raise click.BadParameter("give a percentage above 0%, such as 5%", ctx, param)
    return float(found[1]) / 100


@command.command("verify")
@job_options("tasks")
@click.option("--read-data", is_flag=True, help="Also read every byte and compare the hashes.")
@click.option(
    "--sample",
    callback=_share,
    metavar="PERCENT",
    help="With --read-data: read this share, chosen by chance in each run, such as 5%.",
)
@click.option("--repair", is_flag=True, help="Let the running owners check the damaged blobs and replace them.")
def verify_command(call: Call, read_data: bool, sample: float | None, repair: bool) -> None:
    """Check every blob that a retained checkpoint needs, and the changelogs. The job may be running.

    Each blob must exist, have its size and have no TTL. The changelogs must have what the current checkpoints need.

    With --repair, the names of damaged blobs are left in the blob store for the owners, which look for them every
    minute. An owner checks those that its current checkpoint needs, and publishes that checkpoint again with new
    backups. Older checkpoints stay damaged until newer ones replace them.

    \b
    Exit status: 1 a needed blob still has a TTL (`statemgr gc --fix --write` removes it)
                 4 a needed blob is missing or corrupt, or a changelog has lost records
    """
    from statemgr.flows.upkeep import order_check
    from statemgr.health.verify_blobs import verify_blobs
    from statemgr.wiring import open_services

    if sample is not None and not read_data:
        raise click.UsageError("--sample needs --read-data")
    share = (sample or 1.0) if read_data else 0.0
    with (
        closing(open_services(call.config)) as services,
        call.reader() as reader,
        call.progress() as progress,
    ):
        reader.retaining(tasks=call.tasks)  # refuses a task without a checkpoint
        found = verify_blobs(services, reader.records, call.tasks, share, progress)
        damaged = {one.blob_id for one in found.damaged if one.blob_id}
        if repair and damaged:
            order_check(services, damaged)
    if call.as_json:
        print_json(asdict(found))
    else:
        _print_verified(found, read_data)
        if repair and damaged:
            say(f"owners check {counted(len(damaged), 'blob')} within a minute, and replace what is damaged")
    if found.damaged or found.lost:
        raise SystemExit(MissingError.exit_status)
    if found.expiring:
        raise SystemExit(1)


def _print_verified(found: Verified, read_data: bool) -> None:
    rows = [
        (
            kind,
            finding.task,
            finding.store,
            finding.checkpoint_ids,
            finding.blob_id,
            finding.problem,
        )
        for kind, findings in (("lost", found.lost), ("damaged", found.damaged), ("expiring", found.expiring))
        for finding in findings
    ]
    whole = "all blobs are there, with their sizes and without a TTL"
    print_table(("", "task", "store", "checkpoint", "blob", "problem"), rows, empty=whole)
    checked = (
        f"checked {found.blobs} blobs ({size(found.size)}) of {found.checkpoints} checkpoints, {found.tasks} tasks"
    )
    read = f"; read {size(found.read_size)} of them" if read_data else "; --read-data also reads their bytes"
    say(checked + read)
