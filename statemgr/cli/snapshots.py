"""``statemgr snapshots``: what the blob store holds for retained checkpoints. Reads only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from statemgr.cli.options import checkpoint_option, json_option, task_option, tasks_option, with_config
from statemgr.cli.output import messages, moment, print_json, print_table, progress_bars, size
from statemgr.cli.render import index_to_json_dict
from statemgr.config import JobConfig
from statemgr.config.factories import BLOB_STORE
from statemgr.errors import CorruptError, MissingError
from statemgr.ids import task_index, task_name
from statemgr.model.checkpoint import BlobRef, CheckpointRecord, Marker

if TYPE_CHECKING:
    from statemgr.flows.verify_blobs import Verified
    from statemgr.reader import JobReader


@click.group("snapshots")
def command() -> None:
    """List, show and verify snapshots in the blob store."""


@command.command("list")
@with_config
@json_option
@tasks_option
def list_command(config: JobConfig, as_json: bool, tasks: tuple[str, ...]) -> None:
    """List the snapshot of every store in every retained checkpoint; exit status 4 if one is missing."""
    from statemgr.reader import JobReader

    found: list[dict[str, object]] = []
    with JobReader(config) as reader:
        for record in sorted(reader.records().values(), key=lambda record: task_index(record.task)):
            if not tasks or record.task in tasks:
                found += _snapshots(reader, record)
    _print_list(found, as_json)
    if any(entry["problem"] for entry in found):
        raise SystemExit(MissingError.exit_status)


def _snapshots(reader: JobReader, record: CheckpointRecord) -> Iterator[dict[str, object]]:
    """One entry per retained checkpoint and store; ``problem`` says why a snapshot could not be read.

    ``segments`` of ``segments_size`` bytes continue it.
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


def _print_list(found: list[dict[str, object]], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [
        (
            entry["task"],
            f"{entry['checkpoint_id']}{' *' if entry['current'] else ''}",
            entry["store"],
            "" if entry["files"] is None else entry["files"],
            "" if entry["size"] is None else size(int(str(entry["size"]))),
            "" if not entry["segments"] else f"{entry['segments']}, {size(int(str(entry['segments_size'])))}",
            entry["problem"] or entry["index"],
        )
        for entry in found
    ]
    columns = ("task", "checkpoint (* in force)", "store", "files", "size", "segments", "index blob")
    print_table(columns, rows, empty="no snapshots yet")


@command.command("show")
@with_config
@json_option
@task_option
@checkpoint_option
@click.argument("store")
def show_command(config: JobConfig, as_json: bool, task: str | None, checkpoint_id: str | None, store: str) -> None:
    """Show every file of the snapshot of STORE, and where its parts are (of Partition 0 by default)."""
    from statemgr.reader import JobReader

    with JobReader(config) as reader:
        index = reader.index(task or task_name(0), store, checkpoint_id)
    if as_json:
        print_json(index_to_json_dict(index))
        return
    head = f"{index.task} / {index.store}, state {index.state_id}, made {moment(index.created_ms)}"
    messages().print(f"{head}, {size(index.root.size)}", markup=False)
    rows = [
        (path, file.size, stored, file.hash.hex(), "in the index" if file.inline is not None else part)
        for path, file in index.root.walk()
        for part, stored in ([(blob.blob_id, stored) for blob, stored in file.stored()] or [("", file.size)])
    ]
    print_table(("file", "bytes", "stored", "hash", "part"), rows, empty="no files")


def _share(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A callback: ``5%`` as 0.05."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)\s*%", value.strip())
    if not found or not 0 < float(found[1]) <= 100:
        raise click.BadParameter("give a percentage above 0%, such as 5%", ctx, param)
    return float(found[1]) / 100


@command.command("verify")
@with_config
@json_option
@tasks_option
@click.option("--read-data", is_flag=True, help="Also read every byte and compare the hashes.")
@click.option(
    "--sample",
    callback=_share,
    metavar="PERCENT",
    help="With --read-data: read this share, chosen by chance in each run, such as 5%.",
)
def verify_command(
    config: JobConfig, as_json: bool, tasks: tuple[str, ...], read_data: bool, sample: float | None
) -> None:
    """Check every blob that a retained checkpoint needs. The job may be running.

    Each blob must exist, have its size and have no TTL.

    \b
    Exit status: 1 a needed blob still has a TTL (`statemgr gc --fix` removes it)
                 4 a needed blob is missing or corrupt
    """
    from statemgr.flows.verify_blobs import verify_blobs
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.wiring import open_services

    if sample is not None and not read_data:
        raise click.UsageError("--sample needs --read-data")
    share = (sample or 1.0) if read_data else 0.0
    services = open_services(config)
    try:
        log = CheckpointTopic(config, services.clock)
        try:
            with progress_bars(quiet=as_json) as progress:
                found = verify_blobs(services, log, tasks, share, progress)
        finally:
            log.close()
    finally:
        services.close()
    if as_json:
        print_json(asdict(found))
    else:
        _print_verified(found, read_data)
    if found.damaged:
        raise SystemExit(MissingError.exit_status)
    if found.expiring:
        raise SystemExit(1)


def _print_verified(found: Verified, read_data: bool) -> None:
    rows = [
        (
            "damaged" if finding in found.damaged else "expiring",
            finding.task,
            finding.store,
            finding.checkpoint_id,
            finding.blob_id,
            finding.problem,
        )
        for finding in (*found.damaged, *found.expiring)
    ]
    whole = "all blobs are there, with their sizes and without a TTL"
    print_table(("", "task", "store", "checkpoint", "blob", "problem"), rows, empty=whole)
    checked = (
        f"checked {found.blobs} blobs ({size(found.size)}) of {found.checkpoints} checkpoints, {found.tasks} tasks"
    )
    read = f"; read {size(found.read_size)} of them" if read_data else "; --read-data also reads their bytes"
    messages().print(checked + read, markup=False)
