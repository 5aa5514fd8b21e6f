"""``statemgr rescale``: gives the job another number of tasks. Only ``--write`` fences and writes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from statemgr.config import JobConfig
from statemgr.errors import AccessDenied, ConfigError, RetryableError, StatemgrError, UnavailableError
from statemgr.model.keys.partitioners import PRODUCERS
from statemgr.terminal.options import Call, job_options
from statemgr.terminal.output import console, moment, print_json, print_table, say, size

if TYPE_CHECKING:
    from statemgr.model.checkpoint import Checkpoint
    from statemgr.operations.rescale.plan import RescalePlan
    from statemgr.operations.rescale.rescale import Rescaled
    from statemgr.operations.rescale.undo import UndoPlan
    from statemgr.terminal.toml_edit import TomlEdit

#: The partitioner of the state's keys, and their number; None if they were not looked at.
_Checked = tuple[str, int] | None


@click.command("rescale")
@job_options("checkpoint")
@click.option("--tasks", "count", type=click.IntRange(1, 100_000), metavar="M", help="The new number of tasks.")
@click.option("--write", is_flag=True, help="Rescale the job. Without it, only print what would happen.")
@click.option(
    "--undo",
    is_flag=True,
    help="Go back to the layout before the last rescale, or to the one that retains --checkpoint; and to its last "
    "checkpoint.",
)
@click.option(
    "--partitioner",
    type=click.Choice(PRODUCERS),
    help="How the producers of the input choose a partition: murmur2 (Java clients, Kafka Streams) or crc32 "
    "(librdkafka's default), with quix- before it for keys of Quix Streams (quix-str-, quix-int-, quix-double-, "
    "quix-json- after that key_deserializer). Only needed if the state does not show it, as that of one task.",
)
@click.option(
    "--no-check",
    is_flag=True,
    help="Only plan. Otherwise a run without --write restores the state below state.dir, where --write continues, and "
    "checks every key.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Number of processes.  [default: the machine's cores]",
)
def command(
    call: Call,
    count: int | None,
    write: bool,
    undo: bool,
    partitioner: str | None,
    no_check: bool,
    parallel: int | None,
) -> None:
    """Give the job more or fewer tasks, at a retained checkpoint.

    Each key moves to the task that the recorded partitioner chooses. The job may run while the new stores are built;
    the last step fences it. Stop it before that, and start it with the configuration that this command writes. The old
    layout and its retained checkpoints stay until `statemgr gc --write` collects it, and --undo goes back until then.
    """
    if undo == (count is not None):
        raise click.UsageError("give --tasks, or --undo")
    if undo and (partitioner or parallel or no_check):
        raise click.UsageError("--undo takes no other option than --write and --checkpoint")
    if undo:
        _undo(call, write=write)
    else:
        assert count is not None
        checks = write or not no_check
        _rescale(call, count, partitioner, parallel, write=write, checks=checks)


def _rescale(
    call: Call, tasks: int, partitioner: str | None, parallel: int | None, *, write: bool, checks: bool
) -> None:
    from concurrent.futures.process import BrokenProcessPool

    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.local.machine import SystemClock, processors
    from statemgr.operations.rescale.plan import plan_rescale
    from statemgr.operations.rescale.rescale import Workers, check, rescale
    from statemgr.wiring import WorkerProcesses, open_services

    count = parallel or processors()
    done: Rescaled | None = None
    checked: _Checked = None
    with closing(CheckpointTopic(call.config, SystemClock(), owned=write)) as log:
        records = log.read()
        if records and {record.layout.tasks for record in records.values()} == {tasks}:
            _already(call, tasks, records, write=write)
            return
        plan = plan_rescale(call.config, records, tasks, call.checkpoint_id)
        edit = _edit(call.config, plan.changes)
        if checks:
            with (
                closing(open_services(plan.config)) as services,
                WorkerProcesses(plan.config, count) as processes,
                call.progress() as progress,
            ):
                workers = Workers(processes.submit, count, open_services)
                given = {"checkpoint_id": call.checkpoint_id, "chosen": partitioner}
                try:
                    if write:
                        done = rescale(services, log, tasks, workers, progress, **given)
                        plan = done.built.plan
                    else:
                        checked = check(services, plan, workers, progress, **given)
                except BrokenProcessPool as error:
                    hint = "run it again: it continues; a machine with more memory, or --parallel 1, helps"
                    raise UnavailableError("a process that took part was killed", hint=hint) from error
    edit, saved = _save(edit, write=write)
    if call.as_json:
        print_json(_fields(plan, done, checked, saved))
    else:
        _print(plan, done, checked, edit, saved)


def _already(call: Call, tasks: int, records: Mapping[str, Any], *, write: bool) -> None:
    """The layout is as wanted. A rescale may have died before it wrote the configuration."""
    from statemgr.operations.rescale.plan import changes_in_force

    changes = changes_in_force(call.config, records)
    edit = _edit(call.config, changes) if changes else None
    edit, saved = _save(edit, write=write)
    if call.as_json:
        print_json({"written": False, "tasks": tasks, "before": tasks, "configuration": changes, "saved_as": saved})
        return
    say(f"the job has {tasks} tasks already")
    _print_configuration(changes, edit, saved)


def _undo(call: Call, *, write: bool) -> None:
    from statemgr.flows.input_left import input_of, missing_input, refused_inputs
    from statemgr.kafka.checkpoint_topic import CheckpointTopic
    from statemgr.operations.rescale.undo import look, plan_undo, undo
    from statemgr.wiring import open_services

    published: Mapping[str, Checkpoint] = {}
    damaged: list[dict[str, str]] = []
    refused: list[str] = []
    with (
        closing(open_services(call.config)) as services,
        closing(CheckpointTopic(call.config, services.clock, owned=write)) as log,
    ):
        plan = plan_undo(call.config, log, call.checkpoint_id)
        edit = _edit(call.config, plan.changes)
        offsets, topic_ids = input_of(plan.targets.values())
        try:
            problems = missing_input(call.config, services.clock, offsets, topic_ids)
            refused = refused_inputs(plan.new_config, services.clock)
        except (RetryableError, AccessDenied) as error:  # the state comes back all the same
            problems = [f"this could not be checked: {error.message}"]
        if write:
            with call.progress() as progress:
                plan, published = undo(services, log, open_services, progress, call.checkpoint_id)
        else:
            with closing(open_services(plan.new_config)) as new:
                for task, found in look(new, plan).items():
                    for (factory, store), why in found.items():
                        damaged.append({"task": task, "store": store, "factory": factory, "why": why})
    edit, saved = _save(edit, write=write)
    if call.as_json:
        found_out = {"input_problems": problems, "refused_inputs": refused, "damaged": damaged}
        print_json({**_undo_fields(plan, published, saved), **found_out})
        return
    retired = plan.retired
    say(
        f"back from {plan.before.tasks} tasks to {retired.layout.tasks}, as they were before the rescale at "
        f"{moment(retired.retired_ms)}; everything that the job did since then is taken back"
    )
    _print_offsets(offsets)
    _print_configuration(plan.changes, edit, saved)
    for problem in problems:
        say(f"warning: the job may be unable to read its input: {problem}")
    for problem in refused:
        say(
            f"warning: a consumer loop will refuse its input: {problem}. Name a topic with as many partitions in "
            "task.inputs, or rescale the job again"
        )
    for one in damaged:
        say(
            "warning: {factory} has lost state of {store} of {task}, which is only brought back if another backend or "
            "this machine has it: {why}".format(**one)
        )
    say("done: start the job with this configuration" if published else "nothing was changed; add --write to go back")


# --- the configuration --------------------------------------------------------------------------------------------


def _edit(config: JobConfig, changes: Mapping[str, int | str]) -> TomlEdit | None:
    """The change of the configuration file; None if only the user can make it."""
    from statemgr.terminal.toml_edit import TomlEdit

    path = Path(click.get_current_context().params["config_file"])
    try:
        return TomlEdit(path, changes)
    except ConfigError:
        return None


def _save(edit: TomlEdit | None, *, write: bool) -> tuple[TomlEdit | None, str | None]:
    """With ``write``, write the file; if that fails, say why. The new layout is current in any case.

    Returns: the change, or None if only the user can make it; and where the old file is now, if it was written.
    """
    if not write or edit is None or edit.old == edit.new:
        return edit, None
    try:
        return edit, str(edit.write("before-rescale"))
    except StatemgrError as error:
        say(f"warning: {error}")
        return None, None


def _print_configuration(changes: Mapping[str, int | str], edit: TomlEdit | None, saved: str | None) -> None:
    if not changes:
        return
    from statemgr.terminal.toml_edit import line_of

    out = console()
    out.print("\nconfiguration of the new layout:", markup=False)
    for key, value in changes.items():
        out.print(line_of(key, value), markup=False, soft_wrap=True)
    if saved is not None and edit is not None:
        say(f"{edit.path} is changed; the old file is {saved}")
    elif edit is None:
        say("the configuration file cannot be changed by this command: change these keys by hand")


# --- output -------------------------------------------------------------------------------------------------------


def _fields(plan: RescalePlan, done: Rescaled | None, checked: _Checked, saved: str | None) -> dict[str, Any]:
    return {
        "written": done is not None,
        "before": plan.before.tasks,
        "tasks": plan.tasks,
        "checkpoints": {task: str(target.checkpoint_id) for task, target in plan.targets.items()},
        "input_offsets": {s: o for inputs in plan.inputs for s, o in inputs.offsets.items()},
        "kept": plan.kept,
        "configuration": dict(plan.changes),
        "saved_as": saved,
        "partitioner": done.built.partitioner if done else checked and checked[0],
        "keys": done.built.keys if done else checked and checked[1],
        "bytes": done.built.size if done else None,
        "published": {task: str(made.checkpoint_id) for task, made in done.checkpoints.items()} if done else {},
    }


def _undo_fields(plan: UndoPlan, published: Mapping[str, Checkpoint], saved: str | None) -> dict[str, Any]:
    return {
        "written": bool(published),
        "before": plan.before.tasks,
        "tasks": plan.retired.layout.tasks,
        "checkpoints": {task: str(target.checkpoint_id) for task, target in plan.targets.items()},
        "input_offsets": {s: o for target in plan.targets.values() for s, o in target.input_offsets.items()},
        "configuration": dict(plan.changes),
        "saved_as": saved,
        "published": {task: str(made.checkpoint_id) for task, made in published.items()},
    }


def _print(
    plan: RescalePlan, done: Rescaled | None, checked: _Checked, edit: TomlEdit | None, saved: str | None
) -> None:
    say(f"from {plan.before.tasks} to {plan.tasks} tasks, keys spread by {plan.before.partitioner}")
    print_table(
        ("task", "checkpoint", "taken", "its keys move to"),
        [
            (task, target.checkpoint_id, moment(target.checkpoint_id.millis), _targets_of(plan, number))
            for number, (task, target) in enumerate(plan.targets.items())
        ],
        empty="no tasks",
    )
    _print_offsets({s: o for inputs in plan.inputs for s, o in inputs.offsets.items()})
    _print_configuration(plan.changes, edit, saved)
    if plan.kept:
        say(
            f"kept checkpoints stay with the layout of {plan.before.tasks} tasks: {', '.join(plan.kept)}. `statemgr "
            "rescale --undo --checkpoint ID` brings it back"
        )
    if checked is not None:
        say(f"{checked[1]} keys are in the tasks that {checked[0]} chooses")
    if done is None:
        say("nothing was changed; stop the job and add --write to rescale it")
        return
    first = next(iter(done.checkpoints.values()))
    say(
        f"done: {done.built.keys} keys ({size(done.built.size)}) spread by {done.built.partitioner}, equal before and "
        f"after; checkpoint {first.checkpoint_id} of {plan.tasks} tasks is published. Start the job with this "
        "configuration"
    )


def _targets_of(plan: RescalePlan, source: int) -> str:
    return ", ".join(str(task) for task in range(plan.tasks) if task % plan.divisor == source % plan.divisor)


def _print_offsets(offsets: Mapping[str, int]) -> None:
    out = console()
    out.print("\ninput offsets that the job continues from (other partitions start at their beginning):", markup=False)
    for source, offset in sorted(offsets.items()):
        out.print(f"{source}  {offset}", markup=False)
