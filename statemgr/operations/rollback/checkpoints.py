"""``statemgr checkpoints``: shows what is on the checkpoint topic, goes back, and keeps. ``rollback --write`` and
``tag`` fence owners."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import click

from statemgr.errors import MissingState
from statemgr.ids import task_index
from statemgr.logs import counted
from statemgr.model.checkpoint import (
    BlobMarker,
    ChangelogMarker,
    Checkpoint,
    CheckpointRecord,
    Marker,
    OpaqueMarker,
)
from statemgr.operations.rollback.command import rollback_command
from statemgr.terminal.options import Call, checkpoint_id_of, job_options
from statemgr.terminal.output import console, moment, print_json, say
from statemgr.terminal.render import inline_chain, to_json_dict


@click.group("checkpoints")
def command() -> None:
    """List and show checkpoints on the checkpoint topic, and go back to one."""


command.add_command(rollback_command)


@command.command("list")
@job_options("tasks")
@click.option("--current", is_flag=True, help="Show only the current checkpoint of each task.")
@click.option("--history", is_flag=True, help="Show every record that is still on the topic, oldest first.")
def list_command(call: Call, current: bool, history: bool) -> None:
    """List the checkpoints that each task retains, newest first."""
    with call.reader() as reader:
        found = reader.history() if history else reader.records().values()
        records = _chosen(list(found), call.tasks)
        if not history:
            records.sort(key=lambda record: task_index(record.task))
        replaced = () if history or call.as_json else reader.replaced()
    pairs = [
        (record, checkpoint)
        for record in records
        for checkpoint in (record.checkpoints[:1] if current or history else record.checkpoints)
    ]
    call.show(
        [to_json_dict(record, checkpoint) for record, checkpoint in pairs],
        ("task", "checkpoint (* current, + kept)", "taken", "seq", "offset", "input offsets", "stores", "backends"),
        [_row(record, checkpoint) for record, checkpoint in pairs],
        empty="no checkpoints yet",
    )
    for retired, kept in replaced:
        if kept:
            say(
                f"the layout with {counted(retired.layout.tasks, 'task')}, replaced at {moment(retired.retired_ms)}, "
                f"keeps {', '.join(kept)}: `statemgr rescale --undo --checkpoint ID` goes back to it"
            )


@command.command("show", short_help="Show checkpoints in full.")
@job_options("tasks", "checkpoint")
def show_command(call: Call) -> None:
    """Show checkpoints in full: offsets, the markers of every backend and store, factories, batch."""
    with call.reader() as reader:
        records = reader.retaining(call.checkpoint_id, call.tasks)
    shown = [(r, c) for r in records for c in r.checkpoints if _wanted(r, c, call.checkpoint_id)]
    if call.as_json:
        print_json([to_json_dict(record, checkpoint) for record, checkpoint in shown])
        return
    for record, checkpoint in shown:
        _print_whole(record, checkpoint)


@command.command("tag", short_help="Keep a checkpoint, or release it.")
@job_options()
@click.argument("wanted_id", metavar="ID", callback=checkpoint_id_of)
@click.option("--keep/--drop", "is_kept", default=None, help="Keep the checkpoint, or release it.")
def tag_command(call: Call, wanted_id: str, is_kept: bool | None) -> None:
    """Keep a retained checkpoint until it is released: later commits, their clean-up and gc leave it alone.

    This publishes the current checkpoint once more, so a running owner is fenced: stop the job first, or let it start
    again.
    """
    from statemgr.flows.opening.open_job import JobTopics
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.operations.rollback.owner import keep
    from statemgr.wiring import open_services

    if is_kept is None:
        raise click.UsageError("say what to do with the checkpoint: --keep or --drop")
    with (
        closing(open_services(call.config)) as services,
        closing(CheckpointTopic(call.config, services.clock, owned=True)) as log,
    ):
        kept = keep(services, log, JobTopics(services), wanted_id, is_kept=is_kept)
    if call.as_json:
        print_json([{"task": task, "kept": list(of_task)} for task, of_task in sorted(kept.items())])
        return
    for task, of_task in sorted(kept.items()):
        say(f"{task} keeps {', '.join(of_task) or 'no checkpoint beyond the retention'}")


def _chosen(records: Sequence[CheckpointRecord], tasks: tuple[str, ...]) -> list[CheckpointRecord]:
    """Records of ``tasks`` (all, if it is empty). Raises: MissingState if a task has none."""
    missing = set(tasks) - {record.task for record in records}
    if missing:
        names = ", ".join(sorted(missing))
        raise MissingState(
            f"the topic has no checkpoint of {names}",
            hint="run `statemgr checkpoints list` to see the checkpoints that exist",
        )
    return [record for record in records if not tasks or record.task in tasks]


def _wanted(record: CheckpointRecord, checkpoint: Checkpoint, checkpoint_id: str | None) -> bool:
    if checkpoint_id is None:
        return checkpoint is record.current
    return str(checkpoint.checkpoint_id) == checkpoint_id


def _row(record: CheckpointRecord, checkpoint: Checkpoint) -> tuple[object, ...]:
    return (
        record.task,
        str(checkpoint.checkpoint_id) + _flags(record, checkpoint),
        moment(checkpoint.checkpoint_id.millis),
        checkpoint.sequence,
        "" if checkpoint.offset is None else checkpoint.offset,
        _offsets(checkpoint),
        ", ".join(sorted(checkpoint.stores)),
        ", ".join(sorted(name for name, stores in checkpoint.state_checkpoint_markers.items() if stores)),
    )


def _flags(record: CheckpointRecord, checkpoint: Checkpoint) -> str:
    kept = " +" if str(checkpoint.checkpoint_id) in record.current.kept else ""
    return (" *" if checkpoint is record.current else "") + kept


def _offsets(checkpoint: Checkpoint) -> str:
    return ", ".join(f"{name}:{offset}" for name, offset in sorted(checkpoint.input_offsets.items()))


def _print_whole(record: CheckpointRecord, checkpoint: Checkpoint) -> None:
    layout = record.layout
    lines: list[tuple[str, Any]] = [
        ("task", record.task),
        ("checkpoint", f"{checkpoint.checkpoint_id} ({moment(checkpoint.checkpoint_id.millis)})"),
        ("current", "yes" if checkpoint is record.current else "no, retained"),
        ("sequence", checkpoint.sequence),
        ("epoch", checkpoint.epoch),
        ("published by", "" if checkpoint.owner is None else checkpoint.owner.label),
        ("offset on the topic", checkpoint.offset),
        ("record version", checkpoint.record_version),
        ("layout", f"{layout.tasks} tasks by {layout.partitioner}, generation {layout.generation}"),
        ("input offsets", _offsets(checkpoint)),
    ]
    for factory, stores in sorted(checkpoint.state_checkpoint_markers.items()):
        lines += [(f"{factory} / {store}", _marker(marker)) for store, marker in sorted(stores.items())]
    for store, names in sorted(checkpoint.restore_factories.items()):
        lines.append((f"restore of {store}", ", ".join(names)))
    if checkpoint.batch:
        lines.append(("batch", f"{checkpoint.batch.batch_id} of query {checkpoint.batch.query_id}"))
    lines += [("attachment", attachment.name) for attachment in checkpoint.attachments]
    if checkpoint.outstanding_ttl:
        lines.append(("TTLs to remove", len(checkpoint.outstanding_ttl)))
    width = max(len(name) for name, _ in lines)
    out = console()
    for name, value in lines:
        out.print(f"{name:<{width}}  {value}", markup=False, soft_wrap=True)
    out.print()


def _marker(marker: Marker) -> str:
    match marker:
        case ChangelogMarker(topic, topic_id, partition, offset, start):
            return f"{topic}-{partition} from offset {start} to {offset} (topic {topic_id or 'ID unknown'})"
        case BlobMarker(blob, inline):
            chain = inline_chain(marker)
            if chain is not None:
                return f"{chain.snapshot.index.blob_id} and {counted(len(chain.segments), 'segment')}"
            return f"inline ({len(inline or b'')} bytes)" if blob is None else f"{blob.blob_id} at {blob.offset or 0}"
        case OpaqueMarker(data):
            return f"{counted(len(data), 'byte')}"
