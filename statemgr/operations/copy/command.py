"""``statemgr copy``: clones the state of a job into a new one. Only ``--write`` writes, and only to the new job.
``statemgr export``: writes the checkpoints of a job to a file, for ``copy --from``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from statemgr.config import JobConfig
from statemgr.errors import CorruptError, InvalidError, MissingError
from statemgr.ids import check_offsets
from statemgr.logs import counted
from statemgr.terminal.options import Call, checkpoint_id_of, job_options
from statemgr.terminal.output import print_json, print_table, say, size

if TYPE_CHECKING:
    from statemgr.operations.copy.copy import Copied
    from statemgr.operations.copy.look import TaskCopy


def _offsets(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, int]:
    """Accept ``orders-0=1234``, and return source partition → offset."""
    pairs = [text.rpartition("=") for text in value]
    if any(not offset.isdecimal() for _, _, offset in pairs):
        raise click.BadParameter("give TOPIC-PARTITION=OFFSET, such as orders-0=1234", ctx, param)
    found = {source: int(offset) for source, _, offset in pairs}
    if len(found) < len(pairs):
        raise click.BadParameter("give one offset for each partition", ctx, param)
    try:
        check_offsets(found)
    except InvalidError as error:
        raise click.BadParameter(f"{error.message}; {error.hint}", ctx, param) from None
    return found


@click.command("copy")
@job_options()
@click.option("--to", "target_file", required=True, type=click.Path(), help="Configuration file of the new job.")
@click.option(
    "--checkpoint",
    "checkpoint_ids",
    callback=checkpoint_id_of,
    metavar="ID",
    multiple=True,
    help="A retained checkpoint. Repeat it where each task has IDs of its own. Default: the current ones; with --from, "
    "the newest ones that still have all of their blobs.",
)
@click.option(
    "--from",
    "export",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Take the checkpoints from a file that `statemgr export` wrote, and not from Kafka.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    callback=_offsets,
    metavar="TOPIC-PARTITION=OFFSET",
    help="Where the new job begins an input partition, if it is in another cluster. Repeatable.",
)
@click.option("--write", is_flag=True, help="Copy the state. Without this option nothing is written.")
def command(
    call: Call,
    target_file: str,
    checkpoint_ids: tuple[str, ...],
    export: Path | None,
    inputs: Mapping[str, int],
    write: bool,
) -> None:
    """Copy the state of a job at a checkpoint into a new job, for a test or a second deployment.

    The job itself may run: it is only read. The new job must never have run, and needs as many tasks and the same
    stores; its backends, its servers and its blob store may be others. It continues from the input offsets of the
    checkpoint, or of --input.
    """
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.operations.copy.copy import copy
    from statemgr.operations.copy.exported import read, whole
    from statemgr.operations.copy.look import beginning_at, check_retained, look
    from statemgr.reader import JobReader
    from statemgr.wiring import open_services

    target_config = JobConfig.from_file(target_file)
    copied: Copied | None = None
    with (
        closing(open_services(call.config)) as source,
        closing(open_services(target_config)) as target,
        closing(CheckpointTopic(target_config, target.clock, owned=write)) as log,
        ExitStack() as stack,
    ):
        reader = None
        if export is None:
            reader = stack.enter_context(JobReader(call.config, only_settled=True))
            records = reader.records()
        else:
            records = whole(source, read(export, call.config), checkpoint_ids)
        tasks: Sequence[TaskCopy] = look(source, target, records, log, checkpoint_ids)
        if inputs:
            tasks = beginning_at(target, tasks, inputs)
        if write:
            try:
                with call.progress() as progress:
                    copied = copy(source, target, log, tasks, progress, exported=export is not None)
            except (MissingError, CorruptError):
                if reader is not None:
                    check_retained(reader.records(), tasks)
                raise
            tasks = copied.tasks
    if any(one.checkpoint.batch is not None and one.checkpoint.batch.has_other_sources for one in tasks):
        say("warning: the query reads a source other than Kafka, and cannot continue in the copy: start refuses it")
    offsets = {name: offset for one in tasks for name, offset in one.checkpoint.input_offsets.items()}
    if call.as_json:
        print_json(_as_json(tasks, offsets, copied))
    else:
        _print(tasks, offsets, copied)


@click.command("export")
@job_options()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
def export_command(call: Call, file: Path) -> None:
    """Write all retained checkpoints of the job to FILE, or to standard output (-). An older export of the job is
    replaced; any other file is refused.

    `statemgr copy --from FILE` makes a new job from it and from the blobs when the checkpoint topic or the whole Kafka
    cluster is lost. The job may run.
    """
    from statemgr.local.machine import SystemClock
    from statemgr.operations.copy.exported import export, only_in_kafka, write
    from statemgr.reader import JobReader

    with JobReader(call.config) as reader:
        records = reader.records()
    if stores := only_in_kafka(records):
        say(f"warning: the state of {', '.join(stores)} is only in a changelog, and would be lost with Kafka")
    lines = export(call.config, records, SystemClock().time_ns() // 1_000_000)
    if str(file) == "-":
        for line in lines:
            click.echo(line, nl=False)
        return
    write(file, call.config, lines)
    checkpoints = sum(len(record.checkpoints) for record in records.values())
    if call.as_json:
        print_json({"file": str(file), "tasks": len(records), "checkpoints": checkpoints})
    else:
        say(f"{file} has {counted(checkpoints, 'checkpoint')} of {counted(len(records), 'task')}")


def _ways(one: TaskCopy) -> list[dict[str, Any]]:
    ways: list[dict[str, Any]] = [
        {"store": name, "factory": "blob-store", "way": "copy", "blobs": len(store.blobs)}
        for name, store in one.stores.items()
    ]
    return ways + [{"store": name, "factory": factory, "way": "fill"} for factory, name in sorted(one.filled)]


def _as_json(tasks: Sequence[TaskCopy], offsets: Mapping[str, int], copied: Copied | None) -> dict[str, Any]:
    published = copied.checkpoints if copied is not None else {}
    moved = None
    if copied is not None:
        done = copied.moved
        moved = {
            "inside": done.inside,
            "streamed": done.streamed,
            "found": done.found,
            "bytes": done.size,
            "written": copied.written,
        }
    return {
        "written": copied is not None,
        "tasks": [
            {
                "task": one.record.task,
                "checkpoint_id": str(one.checkpoint.checkpoint_id),
                "published": str(made.checkpoint_id) if (made := published.get(one.record.task)) else None,
                "stores": _ways(one),
            }
            for one in tasks
        ],
        "input_offsets": offsets,
        "blobs": moved,
    }


def _print(tasks: Sequence[TaskCopy], offsets: Mapping[str, int], copied: Copied | None) -> None:
    rows = [
        (
            one.record.task,
            one.checkpoint.checkpoint_id,
            way["store"],
            way["factory"],
            f"{way['blobs']} blobs are copied" if way["way"] == "copy" else "is written from the restored state",
        )
        for one in tasks
        for way in _ways(one)
    ]
    print_table(("task", "checkpoint", "store", "backend", "how"), rows, empty="no stores")
    print_table(("input", "next offset"), sorted(offsets.items()), empty="no input offsets")
    if copied is None:
        say("nothing was written; add --write to copy")
        return
    done = copied.moved
    say(
        f"copied {done.inside} blobs inside the store and {done.streamed} through this machine ({size(done.size)}); "
        f"{done.found} were there from an earlier run; {copied.written} others, such as indexes, were written"
    )
    first = next(iter(copied.checkpoints.values()))
    say(
        f"checkpoint {first.checkpoint_id} of {counted(len(copied.checkpoints), 'task')} is published; "
        "start the new job"
    )
