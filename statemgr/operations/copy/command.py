"""``statemgr copy``: clones the state of a job into a new one. Only ``--write`` writes, and only to the new job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from statemgr.config import JobConfig
from statemgr.errors import CorruptError, MissingError
from statemgr.logs import counted
from statemgr.terminal.options import Call, checkpoint_id_of, job_options
from statemgr.terminal.output import print_json, print_table, say, size

if TYPE_CHECKING:
    from statemgr.operations.copy.copy import Copied
    from statemgr.operations.copy.look import TaskCopy


@click.command("copy")
@job_options()
@click.option("--to", "target_file", required=True, type=click.Path(), help="Configuration file of the new job.")
@click.option(
    "--checkpoint",
    "checkpoint_ids",
    callback=checkpoint_id_of,
    metavar="ID",
    multiple=True,
    help="A retained checkpoint. Repeat it where each task has IDs of its own. Default: the current ones.",
)
@click.option("--write", is_flag=True, help="Copy the state. Without this option nothing is written.")
def command(call: Call, target_file: str, checkpoint_ids: tuple[str, ...], write: bool) -> None:
    """Copy the state of a job at a checkpoint into a new job, for a test or a second deployment.

    The job itself may run: it is only read. The new job must never have run, and needs as many tasks and the same
    stores; its backends, its servers and its blob store may be others. It continues from the input offsets of the
    checkpoint.
    """
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.operations.copy.copy import copy
    from statemgr.operations.copy.look import check_retained, look
    from statemgr.reader import JobReader
    from statemgr.wiring import open_services

    target_config = JobConfig.from_file(target_file)
    copied: Copied | None = None
    with (
        closing(open_services(call.config)) as source,
        closing(open_services(target_config)) as target,
        closing(CheckpointTopic(target_config, target.clock, owned=write)) as log,
        JobReader(call.config, only_settled=True) as reader,
    ):
        tasks: Sequence[TaskCopy] = look(source, target, reader.records(), log, checkpoint_ids)
        if write:
            try:
                with call.progress() as progress:
                    copied = copy(source, target, log, tasks, progress)
            except (MissingError, CorruptError):
                check_retained(reader.records(), tasks)
                raise
            tasks = copied.tasks
    offsets = {name: offset for one in tasks for name, offset in one.checkpoint.input_offsets.items()}
    if call.as_json:
        print_json(_as_json(tasks, offsets, copied))
    else:
        _print(tasks, offsets, copied)


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
        moved = {"inside": done.inside, "streamed": done.streamed, "found": done.found, "bytes": done.size}
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
        f"{done.found} were there from an earlier run"
    )
    first = next(iter(copied.checkpoints.values()))
    say(
        f"checkpoint {first.checkpoint_id} of {counted(len(copied.checkpoints), 'task')} is published; "
        "start the new job"
    )
